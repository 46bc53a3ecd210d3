"""Whether a recipe's artifacts still are what was recorded: all bytes are hashed again, some log-probs scored again.

Every artifact of the latest materializations is read and compared with its manifest, without any cache of hashes; so are
the shards of the memo, the preference files, the base model, and the weights of the registered version. Then the reference
model scores some rows of the table of log-probs again. They agree if they differ by at most `tolerance` nats times the
square root of the response's number of tokens, as the sum of that many rounding errors does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg

from assets.bodies.release import RELEASE_KEY_TAG
from assets.execution.rescore import rescore
from assets.inputs.current import resolve_root
from assets.inputs.version_repair import files_problem
from assets.lineage.diff import CORRUPT_RECORD, NO_RECORD, changes_since
from assets.lineage.history import History
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import (
    CorruptArtifact,
    CorruptRecord,
    PedigreeError,
    StoreError,
    UnreadableArtifact,
    UsageError,
)
from training.contract.store.store import Artifact
from workflows.commands.run import in_gpu_pool
from workflows.state.expected_state import corrupt_file
from workflows.state.status import LOST

_OUTSIDE = ("preference_source", "base_model")
_SCORED_WITH = ("tokenized_pairs", "reference_model")


@dataclass(frozen=True)
class VerifiedAsset:
    """`fault` says what differs from what was recorded; None if nothing does."""

    asset: str
    fingerprint: str
    ok: bool
    fault: str | None


@dataclass(frozen=True)
class Verification:
    """`rescored` is empty and `tolerance` None where nothing was scored: there was a fault, or no table.

    `advice`: what to do if log-probs of the table are not those of the reference model, else None.
    """

    recipe: str
    artifacts: list[VerifiedAsset]
    rescored: list[dict[str, Any]]
    tolerance: float | None
    ok: bool
    advice: str | None = None


def verify(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, rows: int) -> Verification:
    """Verify what was last materialized. Raises UsageError if that is nothing, and what a job raises."""
    verifier = _Verifier(pipeline, services, instance)
    artifacts = [verified for asset in GRAPH if (verified := verifier.asset(asset)) is not None]
    if not artifacts:
        raise UsageError(
            f"nothing of {pipeline.name} was ever materialized; run `pedigree run {pipeline.argument}` first"
        )
    whole = all(asset.ok for asset in artifacts)
    inputs = verifier.scoring_inputs() if rows and whole else None
    if inputs is None:
        return Verification(pipeline.name, artifacts, [], None, whole)
    found = in_gpu_pool("verify", services, instance, lambda: rescore(pipeline, services, inputs, rows))
    right = all(map(agrees, found.rows))
    return Verification(
        pipeline.name, artifacts, found.rows, found.tolerance, right, None if right else _advice(pipeline)
    )


def _advice(pipeline: Pipeline) -> str:
    return (
        f"the reference model does not give the log-probs of the table: `pedigree rescore {pipeline.argument}` sets them "
        f"aside, and then `pedigree run {pipeline.argument}` scores them again"
    )


def agrees(row: dict[str, Any]) -> bool:
    """Whether both log-probs of a rescored row agree with the table, up to rounding; NaN never does."""
    return all(abs(s["live"] - s["stored"]) <= s["allowed"] for s in (row["chosen"], row["rejected"]))


class _Verifier:
    def __init__(self, pipeline: Pipeline, services: Services, instance: dg.DagsterInstance):
        self._pipeline, self._services = pipeline, services
        self._history = History(instance, pipeline, services.store)

    def asset(self, asset: str) -> VerifiedAsset | None:
        """The asset as last materialized; None if it never was."""
        recorded = self._history.latest(asset)
        if recorded.fingerprint is None:
            return None
        fault = next(filter(None, self._faults(asset, recorded.fingerprint, recorded.key)), None)
        return VerifiedAsset(asset, recorded.fingerprint, fault is None, fault)

    def scoring_inputs(self) -> dict[str, Artifact] | None:
        """The latest table with the pairs and the model that it was made from; None if there is no table."""
        key = self._history.latest("reference_logprobs").key
        table = None if key is None else self._services.store.find("reference_logprobs", key)
        if table is None:
            return None
        made_from = table.derivation.inputs
        above = {name: self._services.store.open(name, made_from[name].fingerprint) for name in _SCORED_WITH}
        return {**above, "reference_logprobs": table}

    def _faults(self, asset: str, fingerprint: str, key: str | None) -> Iterator[str | None]:
        """One after the other: what a later one looks at is sound if those before it found nothing."""
        if asset == "released_model":
            yield self._version_problem(fingerprint)
            return
        yield self._artifact_problem(asset, fingerprint)
        yield self._record_problem(asset, key)
        if asset in _OUTSIDE:
            yield self._outside_problem(asset, fingerprint, key)
        if asset == "reference_logprobs":
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
        kind = f"memo/{self._services.store.open('reference_logprobs', fingerprint, hashes=False).details['rule']}"
        faults = [
            fault for shard in self._services.store.fingerprints(kind) if (fault := self._artifact_problem(kind, shard))
        ]
        return f"{len(faults)} shards of its memo are not what was published: {faults[0]}" if faults else None

    def _version_problem(self, release_key: str) -> str | None:
        """Whether the registered version holds the weights of its policy, or of the merged policy if that is an adapter."""
        registry, made_from = self._services.registry, self._history.made_from("released_model")
        release = self._pipeline.recipe.release.model_dump() if made_from is None else made_from.settings
        name = release["model_name"]  # what it was released as, whatever the recipe says by now
        version = registry.find_version(name, {RELEASE_KEY_TAG: release_key})
        if version is None:
            return f"there is no version of {name} for it in the registry any more"
        fault = files_problem(registry, version)
        return f"{fault}: remove what is left of them at {version.source}, then a run puts them back" if fault else None
