"""Bodies of the reference model and of the reference log-probs."""

from dataclasses import replace
from logging import Logger
from pathlib import Path

import dagster as dg

from assets.bodies import checks
from assets.execution.asset_context import AssetContext
from assets.execution.changes import input_changes
from assets.execution.materialize import JobSpec, MaterializedArtifact, materialize, publish_resolved
from assets.inputs.current import ResolvedInput
from assets.pipeline.graph import derive
from assets.pipeline.pipeline import Services
from assets.views.pair_page import render_page, write_page
from assets.views.pair_reader import PairReader
from training.contract.identity.fingerprint import short
from training.contract.store.store import Artifact

_SHOWN_ROWS = 8


def reference_model(context: AssetContext) -> dg.MaterializeResult:
    if context.pipeline.recipe.reference.sft is None:
        pointer = reference_pointer(
            context.services, context.history.artifact("base_model").fingerprint, context.dagster.log
        )
        return replace(pointer, changes=input_changes(context)).result({"made_by": "pointer to the base model"})
    model = materialize(context, JobSpec("sft", context.settings))
    return model.result({"made_by": "supervised tuning on chosen responses", **_numbers(model)})


def reference_pointer(services: Services, base_model: str, log: Logger) -> MaterializedArtifact:
    """Return the reference model as a pointer to the base model with the fingerprint `base_model`."""
    derivation = derive("reference_model", {"base_model": base_model}, {})
    pointer = ResolvedInput(derivation, base_model, {"pointer.json": {"base_model": base_model}})
    return publish_resolved(services, pointer, log)


def reference_logprobs(context: AssetContext) -> dg.MaterializeResult:
    materialized = materialize(context, JobSpec("reference", context.settings))
    table = materialized.artifact
    pairs_fingerprint = table.derivation.inputs["tokenized_pairs"].fingerprint
    pairs = context.services.store.open("tokenized_pairs", pairs_fingerprint)  # the latest may come from another run
    metadata = {
        "dagster/row_count": table.details["pairs"],
        "page": dg.MetadataValue.path(str(_write_page(context, pairs, table))),
        **_numbers(materialized),
        **_cache_use(materialized),
    }
    return materialized.result(metadata, [checks.coverage(table, pairs.details["counts"]["pairs"])])


def _write_page(context: AssetContext, pairs: Artifact, table: Artifact) -> Path:
    """Write a page with a few pairs and the log-probs of their tokens. It is not an artifact: the next one replaces it."""
    reader = PairReader(context.services.store, pairs, table)
    rows = [row for number in reader.spread(_SHOWN_ROWS) if (row := reader.read(number)) is not None]
    page = render_page(f"{context.pipeline.name}: reference log-probs {short(table.fingerprint)}", rows)
    return write_page(context.services.home / "pages" / f"{context.pipeline.name}-reference_logprobs.html", page)


def _cache_use(materialized: MaterializedArtifact) -> dict[str, int]:
    """Return the counts of sequences found in the log-prob cache and of sequences scored by this materialization."""
    details = materialized.artifact.details
    if materialized.reused:
        return {"cache_hits": details["sequences"], "cache_misses": 0}
    return {"cache_hits": details["hits"], "cache_misses": details["scored"]}


def _numbers(materialized: MaterializedArtifact) -> dict[str, float]:
    """Return the numbers among the artifact's details; Dagster plots them over materializations."""
    details = materialized.artifact.details
    return {name: value for name, value in details.items() if isinstance(value, (int, float)) and name != "seconds"}
