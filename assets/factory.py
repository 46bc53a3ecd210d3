"""The Dagster assets of a pipeline: declared from `GRAPH` and the checks, each with one function as its body."""

import time
from collections.abc import Callable

import dagster as dg

from assets.bodies import data, evaluation, policy, prequential, reference, sources, specs
from assets.bodies.automation import ON_CONTENT
from assets.bodies.checks import check_specs
from assets.bodies.release.released_model import released_model
from assets.execution.asset_context import AssetContext
from assets.execution.interruption import explain_interruption
from assets.execution.job_log import with_log
from assets.execution.run_liveness import tag_run_with_process
from assets.execution.stopped_runs import note_code_versions
from assets.inputs.name_claims import claim_name
from assets.inputs.recipe_location import add_recipe_location
from assets.pipeline.graph import GRAPH, STAGE_TAG
from assets.pipeline.pipeline import Pipeline, Services, emitting
from assets.views.metadata import plain_values
from assets.views.pages import description, publish_card
from training.contract.identity.file_hashing import report_hashing_to
from training.contract.protocol.artifacts import AssetName

_OWNER = "team:preference-tuning"
_BODIES: dict[str, Callable[[AssetContext], dg.MaterializeResult]] = {
    AssetName.PREFERENCE_SOURCE: sources.preference_source,
    AssetName.BASE_MODEL: sources.base_model,
    AssetName.TOKENIZATION_SPEC: specs.tokenization_spec,
    AssetName.TRAINING_SPEC: specs.frozen_section,
    AssetName.EVALUATION_SPEC: specs.frozen_section,
    AssetName.RELEASE_SPEC: specs.release_spec,
    AssetName.RAW_PREFERENCES: data.raw_preferences,
    AssetName.TOKENIZED_PAIRS: data.tokenized_pairs,
    AssetName.REFERENCE_MODEL: reference.reference_model,
    AssetName.REFERENCE_LOGPROBS: reference.reference_logprobs,
    AssetName.PREQUENTIAL_SCORES: prequential.prequential_scores,
    "policy": policy.policy,
    "evaluation": evaluation.evaluation,
    AssetName.RELEASED_MODEL: released_model,
}


def build_assets(pipeline: Pipeline, freshness: dg.FreshnessPolicy | None = None) -> list[dg.AssetsDefinition]:
    """Return the assets of `pipeline`, in the order of the graph. `freshness`: the policy of the released model."""
    return [_build_asset(pipeline, asset, freshness if asset == AssetName.RELEASED_MODEL else None) for asset in GRAPH]


def _build_asset(pipeline: Pipeline, asset: str, freshness: dg.FreshnessPolicy | None) -> dg.AssetsDefinition:
    node, recipe = GRAPH[asset], pipeline.recipe

    @dg.asset(
        key=pipeline.key(asset),
        deps=[pipeline.key(name) for name in node.upstream(recipe)],
        group_name=pipeline.identifier,
        tags=_tags(pipeline, asset),
        kinds=set(node.kinds),
        owners=[_OWNER],
        description=description(pipeline, asset, node.description),
        code_version=node.code_version(recipe),
        check_specs=check_specs(pipeline, asset),
        automation_condition=ON_CONTENT if recipe.automation.on_change else None,
        pool=node.pool,
        freshness_policy=freshness,
    )
    def materialize(context: dg.AssetExecutionContext, services: dg.ResourceParam[Services]) -> dg.MaterializeResult:
        tag_run_with_process(context.instance, context.run, services.home)
        note_code_versions(context)
        claim_name(services.home, pipeline)
        asset_context = AssetContext(pipeline, services, context)
        started = time.monotonic()
        hashing = emitting(with_log(services, context.log, asset).listener, asset)
        with explain_interruption(asset_context), report_hashing_to(hashing), add_recipe_location(pipeline):
            result = _BODIES[asset](asset_context)
        publish_card(services.home, pipeline, asset, plain_values(result.metadata or {}))
        return dg.MaterializeResult(
            metadata={**(result.metadata or {}), "seconds": round(time.monotonic() - started, 3)},
            check_results=result.check_results,
            data_version=result.data_version,
            tags=asset_context.provenance(),
        )

    return materialize


def _tags(pipeline: Pipeline, asset: str) -> dict[str, str]:
    """Return tags for Dagster's asset selection, such as `tag:pedigree/stage=training and tag:pedigree/loss=simpo`."""
    node = GRAPH[asset]
    return {
        STAGE_TAG: node.stage,
        "pedigree/recipe": pipeline.identifier,
        "pedigree/loss": pipeline.recipe.training.loss.type.value,
        **({"pedigree/pool": node.pool} if node.pool else {}),
    }
