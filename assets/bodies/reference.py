"""Bodies of the reference model and of the reference log-probs."""

from dataclasses import replace
from logging import Logger
from typing import Any

import dagster as dg

from assets.bodies import checks
from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes
from assets.execution.materialize import JobSpec, MaterializedArtifact, materialize, publish_resolved
from assets.inputs.current import ResolvedInput
from assets.pipeline.graph import derive
from assets.pipeline.pipeline import Services
from assets.views.pages import publish_pairs
from assets.views.pair_page import render_page
from assets.views.pair_reader import PairReader
from assets.views.sentences import of_logprobs, of_supervised_tuning
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import (
    BASE_MODEL,
    REFERENCE_LOGPROBS,
    REFERENCE_MODEL,
    TOKENIZED_PAIRS,
    AssetName,
)
from training.contract.protocol.details import LogProbsDetails, ReferenceModelDetails
from training.contract.protocol.settings import NoSettings, ScoringSettings, SupervisedTuningSettings
from training.contract.store.artifact import Artifact

_SHOWN_ROWS = 8


def reference_model(context: AssetContext) -> dg.MaterializeResult:
    if context.pipeline.recipe.reference.sft is None:
        pointer = reference_pointer(
            context.services, context.history.artifact(BASE_MODEL).fingerprint, context.dagster.log
        )
        return replace(pointer, changes=input_changes(context)).result("The base model itself.", {}, {})
    work = JobSpec("sft", context.settings(SupervisedTuningSettings))
    model = materialize(context, REFERENCE_MODEL, work)
    return model.result(of_supervised_tuning(model.artifact.details), {}, _numbers(model))


def reference_pointer(services: Services, base_model: str, log: Logger) -> MaterializedArtifact[ReferenceModelDetails]:
    """Return the reference model as a pointer to the base model with the fingerprint `base_model`."""
    derivation = derive(AssetName.REFERENCE_MODEL, {AssetName.BASE_MODEL: base_model}, NoSettings())
    pointer = ResolvedInput(derivation, base_model, {"pointer.json": {AssetName.BASE_MODEL: base_model}})
    return publish_resolved(services, REFERENCE_MODEL, pointer, log)


def reference_logprobs(context: AssetContext) -> dg.MaterializeResult:
    materialized = materialize(context, REFERENCE_LOGPROBS, JobSpec("reference", context.settings(ScoringSettings)))
    table = materialized.artifact
    pairs_fingerprint = table.derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint
    pairs = context.services.store.open(TOKENIZED_PAIRS, pairs_fingerprint)  # the latest may come from another run
    hits, scored = _cache_use(materialized)
    figures = {
        "dagster/row_count": table.details.pairs,
        **{name: value for name, value in _numbers(materialized).items() if name not in ("hits", "scored")},
        "cache_hits": hits,
        "cache_misses": scored,
    }
    checked = [checks.coverage(table, pairs.details.counts.pairs)]
    return materialized.result(of_logprobs(hits, scored), _page(context, pairs, table), figures, checked)


def _page(context: AssetContext, pairs: Artifact, table: Artifact) -> dict[str, dg.MetadataValue[Any]]:
    """Write a page with a few pairs and the log-probs of their tokens. It is not an artifact: the next one replaces it."""
    reader, is_exact = PairReader(context.services.store, pairs, table), context.pipeline.recipe.evaluation.is_exact
    rows = [row for number in reader.spread(_SHOWN_ROWS, is_exact) if (row := reader.read(number)) is not None]
    page = render_page(f"{context.pipeline.name}: reference log-probs {short(table.fingerprint)}", rows)
    return publish_pairs(context.services.home, context.pipeline, page)


def _cache_use(materialized: MaterializedArtifact[LogProbsDetails]) -> tuple[int, int]:
    """Return the counts of sequences found in the log-prob cache and of sequences scored by this materialization."""
    details = materialized.artifact.details
    return (details.sequences, 0) if materialized.reused else (details.hits, details.scored)


def _numbers(materialized: MaterializedArtifact) -> dict[str, float]:
    """Return the numbers among the artifact's details; Dagster plots them over materializations."""
    fields = dict(materialized.artifact.details)
    return {name: value for name, value in fields.items() if isinstance(value, (int, float)) and name != "seconds"}
