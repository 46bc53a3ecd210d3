"""What a run would compute and what it would reuse, with counts.

Counts are true only if the rows and tokens are those of now. So whatever costs seconds and no GPU (sources, specs, rows,
tokens) is made in the store first, by the code that a run would use, and with that no more than a run would find there: Dagster
is told of nothing, no asset counts as materialized. Nothing of the pool `gpu` runs. Of an artifact that such a job has still to
make, only that it will be made is known, and so of everything that reads it.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg
import numpy as np
import pyarrow as pa

from assets.data import PAIRS_WORK, preferences_work
from assets.graph import GRAPH
from assets.pipeline import Pipeline, Services
from assets.realize import Realized, make, record_found
from assets.reference import point_to
from assets.release import is_decided
from assets.specs import tokenizer_work
from assets.world import ROOTS, find_data, find_model, find_tokenizer, look
from training.contract.memo import Memo, scoring_rule
from training.contract.scoring import SCORING_VERSION
from training.contract.shard import KEY_BYTES
from training.contract.store import Artifact
from workflows.lineage import Outlook, judge, outlook

Action = Literal["compute", "reuse"]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedAsset:
    """`causes` say why it is computed; `work` counts what there is to do, or what is reused, and depends on the asset."""

    asset: str
    action: Action
    causes: tuple[str, ...]
    work: dict[str, Any]


def plan(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> list[PlannedAsset]:
    """What a run would do for every asset, in the order of the graph. Raises what the cheap part of a run raises."""
    cheap = _Cheap.made(pipeline, services)
    outcomes = outlook(pipeline, services)
    causes = {judged.asset: judged.causes for judged in judge(pipeline, services, instance, outcomes)}
    planned = []
    for asset in GRAPH:
        action = _action(asset, pipeline, services, outcomes)
        work = _Work(pipeline, services, cheap, outcomes).of(asset, action)
        planned.append(PlannedAsset(asset, action, causes[asset] if action == "compute" else (), work))
    return planned


def sentence(planned: Sequence[PlannedAsset]) -> str:
    """The plan as one sentence: what would be done, and which assets of the data, of models and of figures are reused."""
    doing = [words for asset in planned if asset.action == "compute" and (words := _doing(asset))]
    reused = [asset.asset for asset in planned if asset.action == "reuse" and asset.asset not in ROOTS]
    first = f"would {', '.join(doing)}" if doing else "would compute nothing"
    return f"{first}; reuses {', '.join(reused)}" if reused else first


@dataclass(frozen=True)
class _Cheap:
    """What was made in the store, or found there, before anything is planned."""

    source: Realized
    rows: Realized
    pairs: Realized

    @classmethod
    def made(cls, pipeline: Pipeline, services: Services) -> "_Cheap":
        data, model = find_data(pipeline), find_model(pipeline, services)
        tokenizer = find_tokenizer(pipeline, services)
        source, base_model = record_found(services, data), record_found(services, model)
        for asset in ("training_spec", "evaluation_spec"):
            record_found(services, look(pipeline, services, asset))
        spec = make(pipeline, services, "tokenization_spec", tokenizer_work(tokenizer), {}, _LOG)
        reading = preferences_work(pipeline, data)
        rows = make(pipeline, services, "raw_preferences", reading, {"preference_source": source.artifact}, _LOG)
        above = {"raw_preferences": rows.artifact, "tokenization_spec": spec.artifact}
        pairs = make(pipeline, services, "tokenized_pairs", PAIRS_WORK, above, _LOG)
        if pipeline.recipe.reference.sft is None:
            point_to(services, base_model.artifact.fingerprint)
        return cls(source, rows, pairs)


def _action(asset: str, pipeline: Pipeline, services: Services, outcomes: Outlook) -> Action:
    outcome = outcomes[asset]
    if outcome.fingerprint is None:
        return "compute"
    if asset == "released_model" and not is_decided(services.registry, pipeline, outcome.fingerprint):
        return "compute"
    return "reuse"


class _Work:
    def __init__(self, pipeline: Pipeline, services: Services, cheap: _Cheap, outcomes: Outlook):
        self._pipeline, self._services, self._cheap, self._outcomes = pipeline, services, cheap, outcomes

    def of(self, asset: str, action: Action) -> dict[str, Any]:
        counts, recipe = self._cheap.pairs.artifact.details["counts"], self._pipeline.recipe
        match asset:
            case "preference_source":
                rows = self._cheap.source.artifact.details["rows"].values()
                return {"files": len(rows), "rows": None if None in rows else sum(rows)}
            case "raw_preferences":
                rows_read = self._cheap.rows.artifact.details["counts"]
                return {"rows": rows_read["pairs"], "quarantined": rows_read["quarantined"]}
            case "tokenized_pairs":
                return {"rows": counts["pairs"], "dropped": counts["dropped"]}
            case "reference_model" if recipe.reference.sft is not None:
                sft = recipe.reference.sft
                return {"steps": sft.epochs * math.ceil(counts["train"] / sft.batch_size), "pairs": counts["train"]}
            case "reference_logprobs":
                return self._scoring(action)
            case "policy":
                training = recipe.training
                steps = training.max_steps or training.epochs * math.ceil(counts["train"] / training.batch_size)
                return {"steps": steps, "pairs": counts["train"]}
            case "evaluation":
                return {"pairs": counts["validation"], "samples": recipe.evaluation.samples}
        return {}

    def _scoring(self, action: Action) -> dict[str, int]:
        keys_SK = distinct_sequences(self._cheap.pairs.artifact)
        if action == "reuse":
            return {"sequences": len(keys_SK), "missing": 0}
        weights = self._outcomes["reference_model"].fingerprint
        if weights is None:
            return {"sequences": len(keys_SK), "missing": len(keys_SK)}
        rule = scoring_rule(weights, self._pipeline.recipe.reference.dtype, SCORING_VERSION)
        found_S = Memo(self._services.store, rule).lookup(keys_SK).found_Q
        return {"sequences": len(keys_SK), "missing": int((~found_S).sum())}


def distinct_sequences(pairs: Artifact) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The keys of all sequences of `tokenized_pairs`, each once: uint8[S, 32]."""
    with pa.memory_map(str(pairs.file("pairs.arrow"))) as source, pa.ipc.open_stream(source) as stream:
        table = stream.read_all().select(["chosen_key", "rejected_key"])
        joined = b"".join(key for column in table.columns for key in column.to_pylist())
    keys: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
    return np.unique(keys, axis=0)


def _doing(asset: PlannedAsset) -> str | None:
    work = asset.work
    match asset.asset:
        case "reference_model":
            return f"tune the reference model for {work['steps']:,} steps" if work else None
        case "reference_logprobs":
            return f"score {work['missing']:,} of {work['sequences']:,} sequences"
        case "policy":
            return f"train {work['steps']:,} steps"
        case "evaluation":
            return "evaluate"
        case "released_model":
            return "decide on the release"
    return f"make {asset.asset}"
