"""Why an artifact is not what it was: each cause behind the name of the asset where it arises.

Two ask: `pedigree status`, of what a run would make, and a run, of what it makes. Both follow the inputs that differ upstream
to what a person did: a field of the recipe, a file, another version of a library.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from assets.inputs.current import ResolvedInput
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from assets.pipeline.graph import Settings
from training.contract.errors import StoreError
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

Cause = tuple[str, str]  # the asset where it arises, and its words


@dataclass(frozen=True)
class CurrentDerivation:
    """How an asset is made now; `inputs` are fingerprints by name, None for one that has yet to be made.

    `found`: for a source or a spec, what it is made from.
    """

    version: str
    settings: Settings
    inputs: Mapping[str, str | None]
    found: ResolvedInput | None = None


@dataclass(frozen=True)
class CauseFinder:
    """Finds the causes behind inputs that differ.

    `now` says how the artifact of an asset with a fingerprint is made, None if that is unknown. `known` gives the causes of an
    asset that were found already. `unexplained` gives the words for an input, its old and its new fingerprint.
    """

    store: Store
    now: Callable[[str, str | None], CurrentDerivation | None]
    unexplained: Callable[[str, str, str | None], str]
    known: Callable[[str], list[Cause]] = lambda name: []

    def inherited(self, asset: str, before: Derivation, now: CurrentDerivation) -> Iterator[Cause]:
        """Why the inputs of `asset` differ from those of `before`, how it was made."""
        for name, version in now.inputs.items():
            old = before.inputs.get(name)
            if old is None:
                yield asset, f"{name} is an input now"
            elif old.fingerprint != version:
                told = self.known(name) or self.since(name, old.fingerprint, version)
                yield from told or [(asset, self.unexplained(name, old.fingerprint, version))]
        for name in sorted(before.inputs.keys() - now.inputs.keys()):
            yield asset, f"{name} is no input any more"

    def since(self, name: str, old: str, version: str | None) -> list[Cause]:
        """Why `name` is the artifact `version` and no longer `old`; empty if that is unknown.

        So what a person did is told as long as anything made from the old artifact is there, after a run that ended early too.
        """
        try:
            before = self.store.open(name, old, hashes=False).manifest.made_from
            now = self.now(name, version)
        except StoreError:
            return []
        if now is None:
            return []
        if now.found is not None:
            told = changes_since(self.store, before.key, now.found)
            return [(name, words) for words in told if words not in (NO_RECORD, CORRUPT_RECORD)]
        own = own_changes(before, now.version, now.settings)
        return [*((name, words) for words in own), *self.inherited(name, before, now)]


def in_words(asset: str, causes: Iterable[Cause]) -> list[str]:
    """Each cause once; one that arises elsewhere is preceded by the name of that asset."""
    return [words if origin == asset else f"{origin}: {words}" for origin, words in dict.fromkeys(causes)]
