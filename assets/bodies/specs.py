"""The four sections of a recipe that are frozen as artifacts: what lies below takes these settings from them.

So a policy that is materialized alone is trained with the settings that were last materialized, whatever the recipe says by
then. An asset below that has fields of its own (`reads` in the graph) takes these from the recipe as Dagster loaded it.
"""

from typing import Any

import dagster as dg

from assets.execution.asset_context import AssetContext
from assets.execution.job_log import log_message
from assets.execution.materialize import JobSpec, MaterializedArtifact, materialize, materialize_resolved
from assets.inputs.current import ResolvedRelease, ResolvedTokenizer, find_release, find_tokenizer, resolve_root
from assets.inputs.model_ref import tokenizer_of
from assets.inputs.recipe_location import tokenizer_places
from assets.inputs.resolve import LocatedTokenizer
from assets.inputs.version_repair import restore_files, restore_named
from assets.pipeline.pipeline import Pipeline
from assets.views.metadata import verbatim


def tokenizer_work(pipeline: Pipeline, found: ResolvedTokenizer) -> JobSpec:
    """The job that freezes the tokenizer and the template that were found."""
    return JobSpec("tokenizer", found.derivation.settings, tokenizer_locations(pipeline, found.located))


def release_work(pipeline: Pipeline, found: ResolvedRelease) -> JobSpec:
    """The job that collects what is released beside the weights."""
    assert found.shipping is not None, "the base model was downloaded"
    of_tokenizer = tokenizer_locations(pipeline, found.tokenizer)
    return JobSpec("release_files", found.derivation.settings, {**of_tokenizer, "base": str(found.shipping.folder)})


def tokenizer_locations(pipeline: Pipeline, located: LocatedTokenizer) -> dict[str, Any]:
    """Where a job finds the tokenizer and the template; `named` is for its errors."""
    return {
        "tokenizer": str(located.folder),
        "chat_template": None if located.chat_template is None else str(located.chat_template),
        "named": tokenizer_places(pipeline),
    }


def tokenization_spec(step: AssetContext) -> dg.MaterializeResult:
    restore_named(step.services, step.pipeline, tokenizer_of(step.pipeline.recipe))
    found = find_tokenizer(step.pipeline, step.services)
    made = materialize(step, tokenizer_work(step.pipeline, found), found)
    spec = made.artifact.json("spec.json")
    return made.result(
        {
            "spec": dg.MetadataValue.json(spec),
            "template": verbatim([spec["template"]], "jinja"),
            "notes": _told_notes(step, made),
        }
    )


def release_spec(step: AssetContext) -> dg.MaterializeResult:
    restore_named(step.services, step.pipeline, tokenizer_of(step.pipeline.recipe))
    found = find_release(step.pipeline, step.services)
    made = materialize(step, release_work(step.pipeline, found), found)
    spec = made.artifact.json("spec.json")
    files = {"files": dg.MetadataValue.json(sorted(made.artifact.manifest.files))}
    return made.result({"spec": dg.MetadataValue.json(spec), **files, "notes": _told_notes(step, made)})


def _told_notes(step: AssetContext, made: MaterializedArtifact) -> dg.MarkdownMetadataValue:
    """What a person should know of the artifact. A job tells it while it runs; of what is reused it is told again here."""
    notes = made.artifact.details.get("notes", [])
    for note in notes if made.reused else ():
        log_message(step.services, step.context.log, step.asset, note)
    return dg.MetadataValue.md("\n\n".join(notes) or "none")


def frozen_section(step: AssetContext) -> dg.MaterializeResult:
    """The body of `training_spec` and `evaluation_spec`, made of the recipe, and of the champion or the base model's files."""
    recipe, services = step.pipeline.recipe, step.services
    starts_from_champion = step.asset == "training_spec" and recipe.training.start_from == "champion"
    champion = services.registry.champion(recipe.release.model_name) if starts_from_champion else None
    if champion is not None:
        restore_files(services, champion)
    found = resolve_root(step.pipeline, services, step.asset)
    return materialize_resolved(step, found).result({"spec": dg.MetadataValue.json(found.files["spec.json"])})
