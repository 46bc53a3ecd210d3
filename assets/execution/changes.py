"""Changes of an asset since its latest materialization, as text, during a run."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from assets.execution.asset_context import AssetContext
from assets.inputs.current import ROOTS, ResolvedInput, resolve_root
from assets.lineage.causes import Cause, CauseFinder, CurrentDerivation, cause_texts
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since, own_changes
from assets.pipeline.graph import GRAPH, read_settings
from training.contract.config.key_settings import key_settings
from training.contract.errors import CorruptRecord, PedigreeError
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import AssetName
from training.contract.store.manifest import Derivation

_FROM_RECIPE = (AssetName.TRAINING_SPEC, AssetName.EVALUATION_SPEC)  # only their settings can differ


def resolved_changes(context: AssetContext, found: ResolvedInput) -> list[str] | None:
    """Return how `found` differs from the latest materialization of the asset; None without one."""
    key = context.history.latest(found.asset).key
    return None if key is None else changes_since(context.services.store, key, found)


def input_changes(context: AssetContext) -> list[str] | None:
    """Return why an asset differs from its latest materialization, as in `pedigree status`; None without one.

    If the cause of a changed input is unknown, its fingerprints are reported.
    """
    if context.history.latest(context.asset).fingerprint is None:
        return None
    return cause_texts(context.asset, _causes(context))


def _causes(context: AssetContext) -> Iterator[Cause]:
    history, asset, recipe = context.history, context.asset, context.pipeline.recipe
    finder, node = CauseFinder(context.services.store, _UpstreamDerivations(context), _fingerprint_change), GRAPH[asset]
    latest: dict[str, str | None] = {name: history.latest(name).fingerprint for name in node.inputs(recipe)}
    now = CurrentDerivation(node.version, key_settings(read_settings(asset, recipe, context.pipeline.name)), latest)
    try:
        before, problem = history.made_from(asset), NO_RECORD
    except CorruptRecord:
        before, problem = None, CORRUPT_RECORD
    if before is not None:
        yield from ((asset, change) for change in own_changes(before, now.version, now.settings))
        yield from finder.inherited(asset, before, now)
        return
    yield asset, problem
    for name, version in latest.items():  # without a record, Dagster still knows the inputs' versions
        old = history.latest(asset).input_version(context.pipeline.key(name))
        if old is not None and old != version:
            yield from finder.since(name, old, version) or [(asset, _fingerprint_change(name, old, version))]


def _fingerprint_change(name: str, old: str, now: str | None) -> str:
    return f"{name} {short(old)} -> {short(now)}"


@dataclass(frozen=True)
class _UpstreamDerivations:
    """Derivations of the assets upstream of a step."""

    context: AssetContext

    def __call__(self, asset: str, fingerprint: str | None) -> CurrentDerivation | None:
        """Return the derivation of an artifact; None for an asset not upstream of the step. Raise StoreError."""
        history = self.context.history
        if fingerprint is None or asset not in history.assets:
            return None
        derivation = history.derivation(asset, fingerprint)
        inputs = {name: source.fingerprint for name, source in derivation.inputs.items()}
        if asset not in ROOTS:
            return CurrentDerivation(derivation.code_version, derivation.settings, inputs)
        root = self._resolve_unchanged(derivation)
        if root is None:
            return None
        return CurrentDerivation(derivation.code_version, derivation.settings, inputs, root)

    def _resolve_unchanged(self, derivation: Derivation) -> ResolvedInput | None:
        """Return the source or spec of `derivation` if it has not changed since; else None."""
        if derivation.kind in _FROM_RECIPE:
            return ResolvedInput(derivation, None, {})
        services = self.context.services
        with suppress(PedigreeError, OSError):
            root = resolve_root(self.context.pipeline, services, derivation.kind, services.hashes)
            return root if root.derivation.key == derivation.key else None
        return None
