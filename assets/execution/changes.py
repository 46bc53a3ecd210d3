"""Why an asset that is being materialized differs from its latest materialization, as text."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from assets.execution.asset_context import AssetContext
from assets.inputs.current import ROOTS, ResolvedInput, resolve_root
from assets.lineage.causes import Cause, CauseFinder, CurrentDerivation, in_words
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from assets.pipeline.graph import GRAPH
from training.contract.errors import CorruptRecord, PedigreeError
from training.contract.identity.fingerprint import short
from training.contract.store.manifest import Derivation

_FROM_RECIPE = ("training_spec", "evaluation_spec")  # their settings are all there is to compare


def resolved_changes(step: AssetContext, found: ResolvedInput) -> list[str] | None:
    """How `found` differs from the latest materialization of the asset; None if there is none."""
    key = step.history.latest(found.asset).key
    return None if key is None else changes_since(step.services.store, key, found)


def input_changes(step: AssetContext) -> list[str] | None:
    """Why an asset is not what was last materialized: the causes that `pedigree status` has; None for the first time.

    An input whose change cannot be explained is told by its fingerprints.
    """
    if step.history.latest(step.asset).fingerprint is None:
        return None
    return in_words(step.asset, _causes(step))


def _causes(step: AssetContext) -> Iterator[Cause]:
    history, asset, recipe = step.history, step.asset, step.pipeline.recipe
    explainer, node = CauseFinder(step.services.store, _Made(step), _fingerprints), GRAPH[asset]
    latest = {name: history.latest(name).fingerprint for name in node.inputs(recipe)}
    now = CurrentDerivation(node.version, node.reads(recipe), latest)
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

    step: AssetContext

    def __call__(self, asset: str, fingerprint: str | None) -> CurrentDerivation | None:
        """None for what this recipe does not have upstream of the step. Raises StoreError."""
        history = self.step.history
        if fingerprint is None or asset not in history.assets:
            return None
        how = history.derivation(asset, fingerprint)
        inputs = {name: source.fingerprint for name, source in how.inputs.items()}
        if asset not in ROOTS:
            return CurrentDerivation(how.code_version, how.settings, inputs)
        found = self._found(how)
        return None if found is None else CurrentDerivation(how.code_version, how.settings, inputs, found)

    def _found(self, how: Derivation) -> ResolvedInput | None:
        """What the source or spec `how` was made from, if it is still as it was then."""
        if how.kind in _FROM_RECIPE:
            return ResolvedInput(how, None, {})
        services = self.step.services
        with suppress(PedigreeError, OSError):
            found = resolve_root(self.step.pipeline, services, how.kind, services.hashes)
            return found if found.derivation.key == how.key else None
        return None
