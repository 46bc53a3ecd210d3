"""What a run would compute and reuse, with counts.

Correct counts need the current rows and tokens. So everything that takes seconds and no GPU (sources, specs, rows, tokens) is
first made in the store, by the code of a run. Dagster does not learn of it, so no asset counts as materialized. Nothing runs in
the pool `gpu`: for artifacts of such jobs, and everything downstream, the plan only reports that they will be computed.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg
import numpy as np

from assets.bodies.release.released_model import release_problem
from assets.comparison.contestants import find_contestants, fresh_rows
from assets.execution.materialize import find_intact
from assets.inputs.current import ROOTS
from assets.inputs.recipe_location import add_recipe_location
from assets.lineage.diff import CORRUPT_RECORD
from assets.lineage.history import History
from assets.lineage.pair_diff import pair_changes
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_reader import SIDES, read_pairs
from training.contract.errors import RegistryError
from training.contract.identity.fingerprint import KEY_BYTES
from training.contract.identity.software import COMPARED, scoring_software
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.job import CHECKPOINTS, checkpoints_of, committed_steps, job_folder
from training.contract.store.artifact import Artifact, as_kind
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from workflows.recipes.suggested_settings import advice
from workflows.state.data_artifacts import DataArtifacts, make_data
from workflows.state.expected_state import ExpectedState, expect_state
from workflows.state.status import AssetStatus, job_state, judge

Action = Literal["compute", "reuse"]
Work = Mapping[str, int | None]  # counts by names that depend on the asset; None if unknown before a job
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedAsset:
    """`causes`: why it is computed, or which check of a reused asset was impossible.

    `work` has counts, by names that depend on the asset. `notes` are hints for the user.
    """

    asset: str
    action: Action
    causes: tuple[str, ...]
    work: Work
    notes: tuple[str, ...] = ()


def plan(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> list[PlannedAsset]:
    """Return the work of a run for every asset, in the order of the graph. Raises the errors of the cheap part of a run."""
    with add_recipe_location(pipeline):
        cheap = make_data(pipeline, services)
    expected = _repaired_state(pipeline, services)
    history = History(instance, pipeline, services.store)
    planner = _Planner(pipeline, services, cheap, expected, history)
    return [planner.planned(status) for status in judge(history, services, expected)]


def _repaired_state(pipeline: Pipeline, services: Services) -> ExpectedState:
    """Return the expected state after repairing corrupt records, as a run does from asset to asset."""
    expected = expect_state(pipeline, services, presume=True)
    corrupt = [item.derivation for item in expected.values() if item.derivation and item.fault == CORRUPT_RECORD]
    for derivation in corrupt:
        with services.store.lock(derivation.kind, derivation.key):
            find_intact(services, as_kind(derivation.kind), derivation, _LOG)
    return _repaired_state(pipeline, services) if corrupt else expected


def sentence(planned: Sequence[PlannedAsset]) -> str:
    """Return the plan as one sentence: the work, and the reused assets without sources and specs."""
    actions = [action for asset in planned if asset.action == "compute" and (action := _describe_work(asset))]
    reused = [asset.asset for asset in planned if asset.action == "reuse" and asset.asset not in ROOTS]
    summary = f"would {', '.join(actions)}" if actions else "would compute nothing"
    return f"{summary}; reuses {', '.join(reused)}" if reused else summary


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    services: Services
    cheap: DataArtifacts
    expected: ExpectedState
    history: History

    def planned(self, status: AssetStatus) -> PlannedAsset:
        is_fresh, work = status.state == "fresh", self._work(status.asset, status.state == "fresh")
        if is_fresh or self._exists(status.asset):
            causes = status.causes if is_fresh else ()
            notes = (*self._notes(status.asset), *status.notes)
            return PlannedAsset(status.asset, "reuse", causes, work, notes)
        note = self._advice() if status.asset == AssetName.POLICY else None
        job = job_state(self.services, self.expected[status.asset].derivation)
        hints = (note, None if job is None else f"a run follows its job: {job}")
        notes = (*filter(None, hints), *status.notes)
        return PlannedAsset(status.asset, "compute", status.causes, work, notes)

    def _advice(self) -> str | None:
        """Return advice if the training would hardly change the model."""
        train = self.cheap.pairs.details.counts.train
        return advice(self.pipeline.recipe.training, train, self.cheap.parameters)

    def _notes(self, asset: str) -> tuple[str, ...]:
        match asset:
            case AssetName.TOKENIZATION_SPEC:
                return self.cheap.spec.details.notes
            case AssetName.RELEASE_SPEC:
                return self.cheap.release.details.notes
        return ()

    def _exists(self, asset: str) -> bool:
        fingerprint = self.expected[asset].fingerprint
        if fingerprint is None or asset != AssetName.RELEASED_MODEL:
            return fingerprint is not None
        try:
            return release_problem(self.services, self.pipeline, fingerprint) is None
        except RegistryError:  # as in the status, the version counts as present
            return True

    def _work(self, asset: str, is_fresh: bool) -> Work:
        counts, recipe = self.cheap.pairs.details.counts, self.pipeline.recipe
        match asset:
            case AssetName.PREFERENCE_SOURCE:
                rows = self.cheap.source.details.rows.values()
                known = [count for count in rows if count is not None]
                return {"files": len(rows), "rows": sum(known) if len(known) == len(rows) else None}
            case AssetName.RAW_PREFERENCES:
                rows_of = self.cheap.rows.details.counts
                counted = rows_of.model_dump(include={"quarantined", "duplicates", "conflicting"})
                return {"rows": rows_of.pairs, **self._changed(), **counted}
            case AssetName.TOKENIZED_PAIRS:
                return {"rows": counts.pairs, "dropped": counts.dropped}
            case AssetName.REFERENCE_MODEL if recipe.reference.sft is not None:
                sft = recipe.reference.sft
                steps = sft.epochs * math.ceil(counts.train / sft.batch_size)
                return {"steps": steps, **self._done(asset), "pairs": counts.train}
            case AssetName.REFERENCE_LOGPROBS:
                return self._scoring()
            case AssetName.PREQUENTIAL_SCORES:
                return {} if is_fresh else self._arrived()
            case AssetName.POLICY:
                return {
                    "steps": recipe.training.steps(counts.train),
                    **self._done(asset),
                    "pairs": counts.train,
                }
            case AssetName.EVALUATION:
                return {"pairs": counts.validation, "samples": recipe.evaluation.samples}
        return {}

    def _done(self, asset: str) -> dict[str, int]:
        """Return the steps saved by an earlier run, if a run would resume from them."""
        derivation = self.expected[asset].derivation
        if derivation is None or self._exists(asset):
            return {}
        saved = committed_steps(checkpoints_of(job_folder(self.services.home, derivation) / CHECKPOINTS, derivation))
        return {"done": saved[-1]} if saved else {}

    def _changed(self) -> dict[str, int]:
        """Return how many pairs were added and removed since the latest materialization; nothing for equal or first rows."""
        before = self.history.latest(AssetName.RAW_PREFERENCES).fingerprint
        changed = pair_changes(self.services.store, before, self.cheap.rows, self.services.hashes)
        return {} if changed is None else {"added": changed.added, "removed": changed.removed}

    def _scoring(self) -> dict[str, int]:
        keys_SK = distinct_sequences(self.cheap.pairs)
        if self._exists(AssetName.REFERENCE_LOGPROBS):
            return {"sequences": len(keys_SK), "missing": 0}
        weights = self.expected[AssetName.REFERENCE_MODEL].fingerprint
        if weights is None:
            return {"sequences": len(keys_SK), "missing": len(keys_SK)}
        recipe = self.pipeline.recipe
        software = scoring_software(recipe.compute.device)
        logprobs = LogprobCache(self.services.store, scoring_rule(weights, recipe.reference.dtype), software=software)
        missing, foreign = (
            int((~logprobs.lookup(keys_SK).found_Q).sum()),
            int(logprobs.computed_by_other_software(keys_SK).sum()),
        )
        compared = {"compared": min(foreign, COMPARED)} if foreign else {}
        return {"sequences": len(keys_SK), "missing": missing, **compared}

    def _arrived(self) -> dict[str, int]:
        """Return how many pairs have arrived for the champion, and how many policies score pairs; zeros without a champion."""
        base_model, rows = self.expected[AssetName.BASE_MODEL].fingerprint, self.cheap.rows.fingerprint
        if base_model is None:
            return {}
        try:
            contestants = find_contestants(self.pipeline, self.services, base_model)
        except RegistryError:
            return {}
        fresh = [len(fresh_rows(self.pipeline, self.services.store, found, rows)) for found in contestants.all]
        is_any = bool(fresh and fresh[0])
        return {"pairs": fresh[0] if is_any else 0, "policies": sum(map(bool, fresh)) if is_any else 0}


def distinct_sequences(pairs: Artifact) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the distinct keys of all sequences of `tokenized_pairs`: uint8[S, 32]."""
    table = read_pairs(pairs)
    joined = b"".join(key for side in SIDES for key in table[f"{side}_key"].to_pylist())
    keys: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
    return np.unique(keys, axis=0)


def _describe_work(asset: PlannedAsset) -> str | None:
    work = asset.work
    match asset.asset:
        case AssetName.REFERENCE_MODEL:
            return f"tune the reference model for {_steps(work)}" if work else None
        case AssetName.REFERENCE_LOGPROBS:
            again = f", and {work['compared']} again to compare" if "compared" in work else ""
            return f"score {work['missing']:,} of {work['sequences']:,} sequences{again}"
        case AssetName.PREQUENTIAL_SCORES:
            return (
                f"score {work['pairs']:,} new pairs with {_policies(work['policies'] or 0)}"
                if work.get("policies")
                else None
            )
        case AssetName.POLICY:
            return f"train {_steps(work)}"
        case AssetName.EVALUATION:
            return "evaluate"
        case AssetName.RELEASED_MODEL:
            return "decide on the release"
    return f"make {asset.asset}"


def _policies(count: int) -> str:
    return f"{count} {'policy' if count == 1 else 'policies'}"


def _steps(work: Work) -> str:
    done = f" ({work['done']:,} of them are done)" if "done" in work else ""
    return f"{work['steps']:,} steps{done}"
