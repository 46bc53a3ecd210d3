"""Verify a recipe's artifacts against their records: hash all bytes again, and score some pairs again.

The evidence of every promotion of its model is computed again from the scores in the store.

Every artifact of the latest materializations is compared with its manifest, without a cache of hashes. So are the shards of the
log-prob cache, the preference files, the base model, and the weights of the registered version. Then the reference model scores
some rows of the table of log-probs again. They agree if they differ by at most `tolerance` nats times the square root of the
response's number of tokens: the sum of so many rounding errors grows like this.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import dagster as dg

from assets.bodies.release.released_model import RELEASE_KEY_TAG
from assets.comparison.evidence import evidence_problem
from assets.execution.rescore import rescore
from assets.inputs.current import resolve_root
from assets.inputs.version_repair import files_problem
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since
from assets.lineage.history import History
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.gate.ledger import Hypothesis, Ledger, State
from training.contract.errors import (
    CorruptArtifact,
    CorruptRecord,
    PedigreeError,
    StoreError,
    UnreadableArtifact,
    UsageError,
)
from training.contract.protocol.artifacts import REFERENCE_LOGPROBS, AssetName
from training.contract.protocol.details import RescoredPair
from training.contract.store.artifact import Artifact
from workflows.commands.run import in_gpu_pool
from workflows.state.expected_state import corrupt_file
from workflows.state.status import LOST

_OUTSIDE = (AssetName.PREFERENCE_SOURCE, AssetName.BASE_MODEL)
_SCORED_WITH = (AssetName.TOKENIZED_PAIRS, AssetName.REFERENCE_MODEL)


@dataclass(frozen=True)
class VerifiedAsset:
    """`fault`: the difference to the record, or None."""

    asset: str
    fingerprint: str
    ok: bool
    fault: str | None


@dataclass(frozen=True)
class Verification:
    """`rescored` is empty and `tolerance` None if nothing was scored, after a fault or without a table.

    `advice`: the remedy if log-probs of the table differ from the reference model's, else None.
    """

    recipe: str
    artifacts: list[VerifiedAsset]
    rescored: list[RescoredPair]
    tolerance: float | None
    ok: bool
    advice: str | None = None


def verify(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, rows: int) -> Verification:
    """Verify the latest materializations. Raises UsageError without any, and the errors of a job."""
    verifier = _Verifier(pipeline, services, instance)
    artifacts = [verified for asset in GRAPH if (verified := verifier.asset(asset)) is not None]
    artifacts += verifier.promotions() if artifacts else []
    if not artifacts:
        raise UsageError(
            f"nothing of {pipeline.name} was ever materialized; run `pedigree run {pipeline.argument}` first",
            "nothing-materialized",
        )
    intact = all(asset.ok for asset in artifacts)
    inputs = verifier.scoring_inputs() if rows and intact else None
    if inputs is None:
        return Verification(pipeline.name, artifacts, [], None, intact)
    scores = in_gpu_pool("verify", services, instance, lambda: rescore(pipeline, services, inputs, rows))
    agree = all(map(agrees, scores.rows))
    return Verification(
        pipeline.name, artifacts, scores.rows, scores.tolerance, agree, None if agree else _advice(pipeline)
    )


def _advice(pipeline: Pipeline) -> str:
    return (
        f"the log-probs of the table differ from the reference model's: `pedigree rescore {pipeline.argument}` sets them "
        f"aside, and then `pedigree run {pipeline.argument}` scores them again"
    )


def agrees(row: RescoredPair) -> bool:
    """Return whether both log-probs of a rescored row agree with the table, up to rounding; NaN never does."""
    return all(abs(side.live - side.stored) <= side.allowed for side in (row.chosen, row.rejected))


class _Verifier:
    def __init__(self, pipeline: Pipeline, services: Services, instance: dg.DagsterInstance):
        self._pipeline, self._services = pipeline, services
        self._history = History(instance, pipeline, services.store)

    def asset(self, asset: str) -> VerifiedAsset | None:
        """Return the latest materialization of the asset, verified; None if it was never materialized."""
        recorded = self._history.latest(asset)
        if recorded.fingerprint is None:
            return None
        fault = next(filter(None, self._faults(asset, recorded.fingerprint, recorded.key)), None)
        return VerifiedAsset(asset, recorded.fingerprint, fault is None, fault)

    def promotions(self) -> list[VerifiedAsset]:
        """Return the model's promotions in the ledger, with the evidence computed again. They count as `released_model`."""
        name, registry = self._pipeline.recipe.release.model_name, self._services.registry
        entries = [entry for entry in Ledger.read(registry.connection, name).entries if entry.state == State.PROMOTED]
        return [self._promotion(entry) for entry in entries]

    def _promotion(self, entry: Hypothesis) -> VerifiedAsset:
        fault = evidence_problem(self._services.store, entry)
        fault = None if fault is None else f"the promotion of version {entry.candidate}: {fault}"
        return VerifiedAsset(
            f"{AssetName.RELEASED_MODEL}/hypothesis-{entry.number}", entry.policy, fault is None, fault
        )

    def scoring_inputs(self) -> dict[str, Artifact] | None:
        """Return the latest table with its pairs and its model; None without a table."""
        key = self._history.latest(AssetName.REFERENCE_LOGPROBS).key
        table = None if key is None else self._services.store.find(REFERENCE_LOGPROBS, key)
        if table is None:
            return None
        made_from = table.derivation.inputs
        inputs: dict[str, Artifact] = {
            name: self._services.store.open(name, made_from[name].fingerprint) for name in _SCORED_WITH
        }
        return {**inputs, AssetName.REFERENCE_LOGPROBS: table}

    def _faults(self, asset: str, fingerprint: str, key: str | None) -> Iterator[str | None]:
        """Yield faults one after the other: a later check relies on the earlier ones."""
        if asset == AssetName.RELEASED_MODEL:
            yield self._version_problem(fingerprint)
            return
        yield self._artifact_problem(asset, fingerprint)
        yield self._record_problem(asset, key)
        if asset in _OUTSIDE:
            yield self._outside_problem(asset, fingerprint, key)
        if asset == AssetName.REFERENCE_LOGPROBS:
            yield self._cache_problem(fingerprint)

    def _artifact_problem(self, asset: str, fingerprint: str) -> str | None:
        store = self._services.store
        try:
            store.open(asset, fingerprint)
        except CorruptArtifact as error:
            return corrupt_file(store, asset, fingerprint, error)
        except UnreadableArtifact as error:
            return str(error)
        except StoreError:
            return LOST
        return None

    def _record_problem(self, asset: str, key: str | None) -> str | None:
        try:
            return None if key and self._services.store.record(asset, key) else NO_RECORD
        except CorruptRecord:
            return CORRUPT_RECORD

    def _outside_problem(self, asset: str, fingerprint: str, key: str | None) -> str | None:
        try:
            found = resolve_root(self._pipeline, self._services, asset)
        except PedigreeError as error:
            return str(error)
        if found.fingerprint == fingerprint:
            return None
        return "; ".join(changes_since(self._services.store, key, found))

    def _cache_problem(self, fingerprint: str) -> str | None:
        rule = self._services.store.open(REFERENCE_LOGPROBS, fingerprint, hashes=False).details.rule
        kind = f"memo/{rule}"
        faults = [
            fault for shard in self._services.store.fingerprints(kind) if (fault := self._artifact_problem(kind, shard))
        ]
        return f"{len(faults)} shards of its log-prob cache are corrupt: {faults[0]}" if faults else None

    def _version_problem(self, release_key: str) -> str | None:
        """Return the problem if the registered version lacks the weights of its policy, merged if that is an adapter."""
        registry, made_from = self._services.registry, self._history.made_from(AssetName.RELEASED_MODEL)
        release = self._pipeline.recipe.release.model_dump() if made_from is None else made_from.settings
        name = release["model_name"]  # the name at its release, even if the recipe has changed
        version = registry.find_version(name, {RELEASE_KEY_TAG: release_key})
        if version is None:
            return f"its version of {name} is no longer in the registry"
        fault = files_problem(registry, version)
        return f"{fault}: remove the remaining files at {version.source}, then a run restores them" if fault else None
