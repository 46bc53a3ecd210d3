"""What a run would compute and what it would reuse, with counts.

Counts are true only if they are counts of the present rows and tokens. So whatever takes seconds and no GPU (sources,
specs, rows, tokens) is made in the store first, by the code that a run would use. Dagster is told nothing, so no asset
counts as materialized. Nothing runs in the pool `gpu`: for an artifact that such a job has yet to make, and for everything
that depends on it, the plan says only that it will be computed.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg
import numpy as np

from assets.bodies.data import check_splits, pairs_checks, pairs_work, preferences_work, rows_checks
from assets.bodies.embedding_check import check_embeddings
from assets.bodies.reference import reference_pointer
from assets.bodies.release import release_problem
from assets.bodies.specs import release_work, tokenizer_work
from assets.execution.materialize import JobSpec, find_intact, make, publish_resolved
from assets.inputs.current import ROOTS, find_data, find_model, find_release, find_tokenizer, resolve_root
from assets.inputs.recipe_location import written_where_named
from assets.lineage.diff import CORRUPT_RECORD
from assets.lineage.history import History
from assets.lineage.pair_diff import pair_changes
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_reader import SIDES, read_pairs
from training.contract.errors import DataError, RegistryError
from training.contract.identity.fingerprint import KEY_BYTES
from training.contract.identity.model_identity import count_parameters
from training.contract.identity.software import COMPARED, scoring_software
from training.contract.protocol.job import CHECKPOINTS, checkpoints_of, committed_steps, job_folder
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.store import Artifact
from workflows.recipes.suggested_settings import advice, steps_of
from workflows.state.expected_state import ExpectedState, expect_state
from workflows.state.status import AssetStatus, judge

Action = Literal["compute", "reuse"]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedAsset:
    """`causes` say why it is computed, or what could not be asked of one that is reused.

    `work` counts what is to be done, or reused, by names that depend on the asset. `notes` are what a person should know of it.
    """

    asset: str
    action: Action
    causes: tuple[str, ...]
    work: dict[str, Any]
    notes: tuple[str, ...] = ()


def plan(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> list[PlannedAsset]:
    """What a run would do for every asset, in the order of the graph. Raises what the cheap part of a run raises."""
    with written_where_named(pipeline):
        cheap = _make_cheap(pipeline, services)
    expected = _mended(pipeline, services)
    history = History(instance, pipeline, services.store)
    planner = _Planner(pipeline, services, cheap, expected, history)
    return [planner.planned(judged) for judged in judge(history, services, expected)]


def _mended(pipeline: Pipeline, services: Services) -> ExpectedState:
    """What a run would give, with the corrupt records mended, as it would find and mend them from asset to asset."""
    expected = expect_state(pipeline, services, presume=True)
    corrupt = [of.derivation for of in expected.values() if of.derivation and of.fault == CORRUPT_RECORD]
    for how in corrupt:
        with services.store.lock(how.kind, how.key):
            find_intact(services, how, _LOG)
    return _mended(pipeline, services) if corrupt else expected


def sentence(planned: Sequence[PlannedAsset]) -> str:
    """The plan as one sentence: what would be done, and which assets, sources and specs aside, are reused."""
    doing = [words for asset in planned if asset.action == "compute" and (words := _doing(asset))]
    reused = [asset.asset for asset in planned if asset.action == "reuse" and asset.asset not in ROOTS]
    first = f"would {', '.join(doing)}" if doing else "would compute nothing"
    return f"{first}; reuses {', '.join(reused)}" if reused else first


@dataclass(frozen=True)
class _DataArtifacts:
    """What is made in the store, unless it is there, before anything is planned."""

    source: Artifact
    spec: Artifact
    release: Artifact
    rows: Artifact
    pairs: Artifact
    parameters: int


def _make_cheap(pipeline: Pipeline, services: Services) -> _DataArtifacts:
    def made(asset: str, work: JobSpec, **inputs: Artifact) -> Artifact:
        fingerprints = {name: artifact.fingerprint for name, artifact in inputs.items()}
        return make(pipeline, services, asset, work, fingerprints, _LOG).artifact

    data, model, tokenizer = find_data(pipeline), find_model(pipeline, services), find_tokenizer(pipeline, services)
    source, base_model = (publish_resolved(services, found, _LOG).artifact for found in (data, model))
    for asset in ("training_spec", "evaluation_spec"):
        publish_resolved(services, resolve_root(pipeline, services, asset), _LOG)
    spec = made("tokenization_spec", tokenizer_work(pipeline, tokenizer))
    release = made("release_spec", release_work(pipeline, find_release(pipeline, services)))
    check_embeddings(pipeline, services, spec)
    rows = made("raw_preferences", preferences_work(pipeline, data), preference_source=source)
    _check_passed(rows_checks(pipeline, rows))
    pairs = made("tokenized_pairs", pairs_work(pipeline), raw_preferences=rows, tokenization_spec=spec)
    check_splits(pipeline, pairs, GRAPH)
    check_embeddings(pipeline, services, spec, pairs)
    _check_passed(pairs_checks(pipeline, pairs))
    if pipeline.recipe.reference.sft is None:
        reference_pointer(services, base_model.fingerprint, _LOG)
    assert model.located is not None  # it was downloaded
    return _DataArtifacts(source, spec, release, rows, pairs, count_parameters(model.located.folder))


def _check_passed(results: Sequence[dg.AssetCheckResult]) -> None:
    """Raises DataError with the words of the run that would end here."""
    for check in results:
        if not check.passed:
            raise DataError(f"a run would end here: the check {check.check_name} failed: {check.description}")


@dataclass(frozen=True)
class _Planner:
    pipeline: Pipeline
    services: Services
    cheap: _DataArtifacts
    expected: ExpectedState
    history: History

    def planned(self, judged: AssetStatus) -> PlannedAsset:
        is_fresh, work = judged.state == "fresh", self._work(judged.asset)
        if is_fresh or self._is_there(judged.asset):
            causes = judged.causes if is_fresh else ()
            return PlannedAsset(judged.asset, "reuse", causes, work, self._notes(judged.asset))
        told = self._advice() if judged.asset == "policy" else None
        return PlannedAsset(judged.asset, "compute", judged.causes, work, (told,) if told else ())

    def _advice(self) -> str | None:
        """What to change of a training that would hardly change the model."""
        train = self.cheap.pairs.details["counts"]["train"]
        return advice(self.pipeline.recipe.training, train, self.cheap.parameters)

    def _notes(self, asset: str) -> tuple[str, ...]:
        made = {"tokenization_spec": self.cheap.spec, "release_spec": self.cheap.release}.get(asset)
        return () if made is None else tuple(made.details.get("notes", []))

    def _is_there(self, asset: str) -> bool:
        fingerprint = self.expected[asset].fingerprint
        if fingerprint is None or asset != "released_model":
            return fingerprint is not None
        try:
            return release_problem(self.services, self.pipeline, fingerprint) is None
        except RegistryError:  # as for the status: the version is taken to be there
            return True

    def _work(self, asset: str) -> dict[str, Any]:
        counts, recipe = self.cheap.pairs.details["counts"], self.pipeline.recipe
        match asset:
            case "preference_source":
                rows = self.cheap.source.details["rows"].values()
                return {"files": len(rows), "rows": None if None in rows else sum(rows)}
            case "raw_preferences":
                found = self.cheap.rows.details["counts"]
                counted = {name: found[name] for name in ("quarantined", "duplicates", "conflicting")}
                return {"rows": found["pairs"], **self._changed(), **counted}
            case "tokenized_pairs":
                return {"rows": counts["pairs"], "dropped": counts["dropped"]}
            case "reference_model" if recipe.reference.sft is not None:
                sft = recipe.reference.sft
                steps = sft.epochs * math.ceil(counts["train"] / sft.batch_size)
                return {"steps": steps, **self._done(asset), "pairs": counts["train"]}
            case "reference_logprobs":
                return self._scoring()
            case "policy":
                return {
                    "steps": steps_of(recipe.training, counts["train"]),
                    **self._done(asset),
                    "pairs": counts["train"],
                }
            case "evaluation":
                return {"pairs": counts["validation"], "samples": recipe.evaluation.samples}
        return {}

    def _done(self, asset: str) -> dict[str, int]:
        """The steps that an earlier run took and saved, where a run would go on from them."""
        how = self.expected[asset].derivation
        if how is None or self._is_there(asset):
            return {}
        saved = committed_steps(checkpoints_of(job_folder(self.services.home, how) / CHECKPOINTS, how))
        return {"done": saved[-1]} if saved else {}

    def _changed(self) -> dict[str, int]:
        """How many pairs are not those that were last materialized; nothing for rows that are the same, or the first."""
        before = self.history.latest("raw_preferences").fingerprint
        changed = pair_changes(self.services.store, before, self.cheap.rows, self.services.hashes)
        return {} if changed is None else {"added": changed.added, "removed": changed.removed}

    def _scoring(self) -> dict[str, int]:
        keys_SK = distinct_sequences(self.cheap.pairs)
        if self._is_there("reference_logprobs"):
            return {"sequences": len(keys_SK), "missing": 0}
        weights = self.expected["reference_model"].fingerprint
        if weights is None:
            return {"sequences": len(keys_SK), "missing": len(keys_SK)}
        recipe = self.pipeline.recipe
        software = scoring_software(recipe.compute.device)
        memo = LogprobCache(self.services.store, scoring_rule(weights, recipe.reference.dtype), software=software)
        missing, others = (
            int((~memo.lookup(keys_SK).found_Q).sum()),
            int(memo.computed_by_other_software(keys_SK).sum()),
        )
        compared = {"compared": min(others, COMPARED)} if others else {}
        return {"sequences": len(keys_SK), "missing": missing, **compared}


def distinct_sequences(pairs: Artifact) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The keys of all sequences of `tokenized_pairs`, each once: uint8[S, 32]."""
    table = read_pairs(pairs)
    joined = b"".join(key for side in SIDES for key in table[f"{side}_key"].to_pylist())
    keys: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
    return np.unique(keys, axis=0)


def _doing(asset: PlannedAsset) -> str | None:
    work = asset.work
    match asset.asset:
        case "reference_model":
            return f"tune the reference model for {_steps(work)}" if work else None
        case "reference_logprobs":
            again = f", and {work['compared']} again to compare" if "compared" in work else ""
            return f"score {work['missing']:,} of {work['sequences']:,} sequences{again}"
        case "policy":
            return f"train {_steps(work)}"
        case "evaluation":
            return "evaluate"
        case "released_model":
            return "decide on the release"
    return f"make {asset.asset}"


def _steps(work: dict[str, Any]) -> str:
    done = f" ({work['done']:,} of them are done)" if "done" in work else ""
    return f"{work['steps']:,} steps{done}"
