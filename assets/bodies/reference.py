"""The frozen model the policy is measured against, and the log-probs it gives every response."""

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


def reference_model(step: AssetContext) -> dg.MaterializeResult:
    if step.pipeline.recipe.reference.sft is None:
        made = reference_pointer(step.services, step.history.artifact("base_model").fingerprint, step.context.log)
        return replace(made, changes=input_changes(step)).result({"made_by": "pointer to the base model"})
    made = materialize(step, JobSpec("sft", step.settings))
    return made.result({"made_by": "supervised tuning on chosen responses", **_numbers(made)})


def reference_pointer(services: Services, base_model: str, log: Logger) -> MaterializedArtifact:
    """The reference model that is the base model with this fingerprint, unchanged."""
    how = derive("reference_model", {"base_model": base_model}, {})
    return publish_resolved(services, ResolvedInput(how, base_model, {"pointer.json": {"base_model": base_model}}), log)


def reference_logprobs(step: AssetContext) -> dg.MaterializeResult:
    made = materialize(step, JobSpec("reference", step.settings))
    made_from = made.artifact.derivation.inputs["tokenized_pairs"].fingerprint
    pairs = step.services.store.open("tokenized_pairs", made_from)  # another run may have made others meanwhile
    metadata = {
        "dagster/row_count": made.artifact.details["pairs"],
        "page": dg.MetadataValue.path(str(_page(step, pairs, made.artifact))),
        **_numbers(made),
        **_cache_use(made),
    }
    return made.result(metadata, [checks.coverage(made.artifact, pairs.details["counts"]["pairs"])])


def _page(step: AssetContext, pairs: Artifact, table: Artifact) -> Path:
    """A page with a few pairs and the log-probs of their tokens. It is no artifact: the next one replaces it."""
    reader = PairReader(step.services.store, pairs, table)
    rows = [row for number in reader.spread(_SHOWN_ROWS) if (row := reader.read(number)) is not None]
    page = render_page(f"{step.pipeline.name}: reference log-probs {short(table.fingerprint)}", rows)
    return write_page(step.services.home / "pages" / f"{step.pipeline.name}-reference_logprobs.html", page)


def _cache_use(made: MaterializedArtifact) -> dict[str, int]:
    """How many sequences were found in the memo, and how many this materialization scored."""
    details = made.artifact.details
    if made.reused:
        return {"cache_hits": details["sequences"], "cache_misses": 0}
    return {"cache_hits": details["hits"], "cache_misses": details["scored"]}


def _numbers(made: MaterializedArtifact) -> dict[str, float]:
    """The plain numbers among the artifact's details; Dagster plots them over materializations."""
    return {k: v for k, v in made.artifact.details.items() if isinstance(v, (int, float)) and k != "seconds"}
