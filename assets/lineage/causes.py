"""Causes of a changed artifact, each with the asset at which it arises.

`pedigree status` finds causes for the artifacts a run would make, and a run for the artifacts it makes. Both follow changed
inputs upstream to their origin: a field of the recipe, a file, or the version of a library.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from assets.inputs.current import ResolvedInput
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from training.contract.config.json_object import JsonObject
from training.contract.errors import StoreError
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

Cause = tuple[str, str]  # the asset at which it arises, and its text


@dataclass(frozen=True)
class CurrentDerivation:
    """How an asset would be made now.

    `inputs`: fingerprints by name, None if not made yet. `found`: the resolved input of a source or a spec.
    """

    version: str
    settings: JsonObject
    inputs: Mapping[str, str | None]
    found: ResolvedInput | None = None


@dataclass(frozen=True)
class CauseFinder:
    """Finds the causes of changed inputs.

    `now(asset, fingerprint)` returns the current derivation, None if unknown. `known(asset)` returns causes found already.
    `unexplained(name, old, new)` returns the text for an input with two fingerprints and without a known cause.
    """

    store: Store
    now: Callable[[str, str | None], CurrentDerivation | None]
    unexplained: Callable[[str, str, str | None], str]
    known: Callable[[str], list[Cause]] = lambda name: []

    def inherited(self, asset: str, before: Derivation, now: CurrentDerivation) -> Iterator[Cause]:
        """Yield why the inputs of `asset` differ from the inputs in `before`, its earlier derivation."""
        for name, version in now.inputs.items():
            old = before.inputs.get(name)
            if old is None:
                yield asset, f"{name} is an input now"
            elif old.fingerprint != version:
                causes = self.known(name) or self.since(name, old.fingerprint, version)
                yield from causes or [(asset, self.unexplained(name, old.fingerprint, version))]
        for name in sorted(before.inputs.keys() - now.inputs.keys()):
            yield asset, f"{name} is no input any more"

    def since(self, name: str, old: str, version: str | None) -> list[Cause]:
        """Return why `name` changed from the artifact `old` to `version`; empty if unknown.

        So the user's change is reported as long as anything made from the old artifact exists, also after a run ended early.
        """
        try:
            before = self.store.open(name, old, hashes=False).manifest.made_from
            now = self.now(name, version)
        except StoreError:
            return []
        if now is None:
            return []
        if now.found is not None:
            changes = changes_since(self.store, before.key, now.found)
            return [(name, text) for text in changes if text not in (NO_RECORD, CORRUPT_RECORD)]
        changes = own_changes(before, now.version, now.settings)
        return [*((name, text) for text in changes), *self.inherited(name, before, now)]


def cause_texts(asset: str, causes: Iterable[Cause]) -> list[str]:
    """Return the text of each cause once. A cause from another asset begins with the name of that asset."""
    return [text if origin == asset else f"{origin}: {text}" for origin, text in dict.fromkeys(causes)]
