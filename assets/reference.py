"""The frozen model the policy is measured against, and what it says of every response."""

from dataclasses import replace
from pathlib import Path

import dagster as dg

from assets import checks
from assets.changes import input_changes
from assets.graph import GRAPH, derivation
from assets.page import render_page, write_page
from assets.pipeline import Pipeline, Services, declare
from assets.realize import Realized, Work, realize, record, upstream
from assets.rows import PairReader
from training.contract.fingerprint import short
from training.contract.store import Artifact

_SHOWN_ROWS = 8


def reference_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "reference_model")
    def reference_model(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        if pipeline.recipe.reference.sft is None:
            return _pointer(context, pipeline, services).result({"made_by": "pointer to the base model"})
        made = realize(context, pipeline, services, Work("sft", GRAPH["reference_model"].reads(pipeline.recipe)))
        return made.result({"made_by": "supervised tuning on chosen responses", **_numbers(made)})

    return reference_model


def point_to(services: Services, base_model: str) -> Realized:
    """The reference model that is the base model of this fingerprint, unchanged."""
    how = derivation("reference_model", {"base_model": base_model}, {})
    return record(services, how, base_model, {"pointer.json": {"base_model": base_model}})


def _pointer(context: dg.AssetExecutionContext, pipeline: Pipeline, services: Services) -> Realized:
    base = upstream(context, pipeline, services, "base_model")
    changes = input_changes(context.instance, pipeline, "reference_model")
    return replace(point_to(services, base.fingerprint), changes=changes)


def reference_logprobs(pipeline: Pipeline) -> dg.AssetsDefinition:
    @declare(pipeline, "reference_logprobs", checks.specs(pipeline, "reference_logprobs", checks.COVERAGE))
    def reference_logprobs(
        context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]
    ) -> dg.MaterializeResult:
        made = realize(
            context, pipeline, services, Work("reference", GRAPH["reference_logprobs"].reads(pipeline.recipe))
        )
        pairs = upstream(context, pipeline, services, "tokenized_pairs")
        metadata = {
            "dagster/row_count": made.artifact.details["pairs"],
            "page": dg.MetadataValue.path(str(_page(pipeline, services, pairs, made.artifact))),
            **_numbers(made),
            **_cache_use(made),
        }
        return made.result(metadata, [checks.coverage(made.artifact, pairs.details["counts"]["pairs"])])

    return reference_logprobs


def _page(pipeline: Pipeline, services: Services, pairs: Artifact, table: Artifact) -> Path:
    """A few pairs with the log-probs of their tokens. It can be made again from the store, so there is one a recipe."""
    reader = PairReader(services.store, pairs, table)
    rows = [row for number in reader.spread(_SHOWN_ROWS) if (row := reader.read(number)) is not None]
    page = render_page(f"{pipeline.name}: reference log-probs {short(table.fingerprint)}", rows)
    return write_page(services.home / "pages" / f"{pipeline.name}-reference_logprobs.html", page)


def _cache_use(made: Realized) -> dict[str, int]:
    """Sequences found in the memo and sequences scored by this materialization, which scores none if it made nothing."""
    details = made.artifact.details
    if made.reused:
        return {"cache_hits": details["sequences"], "cache_misses": 0}
    return {"cache_hits": details["hits"], "cache_misses": details["scored"]}


def _numbers(made: Realized) -> dict[str, float]:
    """The plain numbers among the artifact's details; Dagster plots them over materializations."""
    return {k: v for k, v in made.artifact.details.items() if isinstance(v, (int, float)) and k != "seconds"}
