"""Why an artifact is not what it was: each cause behind the name of the asset where it arises.

Two ask: `pedigree status`, of what a run would make, and a run, of what it makes. Both follow the inputs that differ upstream
to what a person did: a field of the recipe, a file, another version of a library.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from assets.changes import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from assets.graph import GRAPH, Settings
from assets.step import Step
from assets.world import ROOTS, Found, find_root
from training.contract.errors import CorruptRecord, PedigreeError, StoreError
from training.contract.fingerprint import short
from training.contract.manifest import Derivation
from training.contract.store import Store

Cause = tuple[str, str]  # the asset where it arises, and its words

_FROM_RECIPE = ("training_spec", "evaluation_spec")  # their settings are all there is to compare


@dataclass(frozen=True)
class Now:
    """How an asset is made now; `inputs` are fingerprints by name, None for one that has yet to be made.

    `found`: for a source or a spec, what it is made from.
    """

    version: str
    settings: Settings
    inputs: Mapping[str, str | None]
    found: Found | None = None


@dataclass(frozen=True)
class Explainer:
    """Finds the causes behind inputs that differ.

    `now` says how the artifact of an asset with a fingerprint is made, None if that is unknown. `known` gives the causes of an
    asset that were found already. `unexplained` gives the words for an input, its old and its new fingerprint.
    """

    store: Store
    now: Callable[[str, str | None], Now | None]
    unexplained: Callable[[str, str, str | None], str]
    known: Callable[[str], list[Cause]] = lambda name: []

    def inherited(self, asset: str, before: Derivation, now: Now) -> Iterator[Cause]:
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


def input_changes(step: Step) -> list[str] | None:
    """Why an asset is not what was last materialized: the causes that `pedigree status` has; None for the first time.

    An input whose change cannot be explained is told by its fingerprints.
    """
    if step.history.latest(step.asset).fingerprint is None:
        return None
    return in_words(step.asset, _causes(step))


def _causes(step: Step) -> Iterator[Cause]:
    history, asset, recipe = step.history, step.asset, step.pipeline.recipe
    explainer, node = Explainer(step.services.store, _Made(step), _fingerprints), GRAPH[asset]
    latest = {name: history.latest(name).fingerprint for name in node.inputs(recipe)}
    now = Now(node.version, node.reads(recipe), latest)
    try:
        before, fault = history.made_from(asset), NO_RECORD
    except CorruptRecord:
        before, fault = None, CORRUPT_RECORD
    if before is not None:
        yield from ((asset, words) for words in own_changes(before, now.version, now.settings))
        yield from explainer.inherited(asset, before, now)
        return
    yield asset, fault
    for name, version in latest.items():  # Dagster knows what it was made from
        old = history.latest(asset).input_version(step.pipeline.key(name))
        if old is not None and old != version:
            yield from explainer.since(name, old, version) or [(asset, _fingerprints(name, old, version))]


def _fingerprints(name: str, old: str, now: str | None) -> str:
    return f"{name} {short(old)} -> {short(now)}"


@dataclass(frozen=True)
class _Made:
    """How what a step is made from was made itself."""

    step: Step

    def __call__(self, asset: str, fingerprint: str | None) -> Now | None:
        """None for what this recipe does not have upstream of the step. Raises StoreError."""
        history = self.step.history
        if fingerprint is None or asset not in history.assets:
            return None
        how = history.derivation(asset, fingerprint)
        inputs = {name: source.fingerprint for name, source in how.inputs.items()}
        if asset not in ROOTS:
            return Now(how.code_version, how.settings, inputs)
        found = self._found(how)
        return None if found is None else Now(how.code_version, how.settings, inputs, found)

    def _found(self, how: Derivation) -> Found | None:
        """What the source or spec `how` was made from, if it is still as it was then."""
        if how.kind in _FROM_RECIPE:
            return Found(how, None, {})
        services = self.step.services
        with suppress(PedigreeError, OSError):
            found = find_root(self.step.pipeline, services, how.kind, services.hashes)
            return found if found.derivation.key == how.key else None
        return None
