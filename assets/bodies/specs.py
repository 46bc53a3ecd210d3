"""Bodies of the specs: the four sections of a recipe that are frozen as artifacts. Assets downstream read settings from them.

So a policy materialized alone is trained with the latest materialized settings, not with the recipe's current ones. An asset
downstream with fields of its own (`reads` in the graph) takes these from the recipe loaded by Dagster.
"""

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
from assets.views.sentences import of_evaluation_settings, of_release_files, of_tokenization, of_training
from training.contract.config.json_object import JsonObject
from training.contract.protocol.artifacts import (
    EVALUATION_SPEC,
    RELEASE_SPEC,
    TOKENIZATION_SPEC,
    TRAINING_SPEC,
    AssetName,
)
from training.contract.protocol.locations import ReleaseFilesLocations, TokenizerLocations
from training.contract.protocol.settings import EvaluationSpec, TrainingSpec
from training.contract.protocol.spec_files import SPEC_FILE, TokenizationSpec


def tokenizer_work(pipeline: Pipeline, found: ResolvedTokenizer) -> JobSpec:
    """Return the job that freezes the resolved tokenizer and template."""
    return JobSpec("tokenizer", found.settings, TokenizerLocations(**_tokenizer_locations(pipeline, found.located)))


def release_work(pipeline: Pipeline, found: ResolvedRelease) -> JobSpec:
    """Return the job that collects the files released beside the weights."""
    assert found.shipping is not None and found.settings is not None, "the base model was downloaded"
    locations = ReleaseFilesLocations(**_tokenizer_locations(pipeline, found.tokenizer), base=found.shipping.folder)
    return JobSpec("release_files", found.settings, locations)


def _tokenizer_locations(pipeline: Pipeline, located: LocatedTokenizer) -> JsonObject:
    return {
        "tokenizer": located.folder,
        "chat_template": located.chat_template,
        "named": tokenizer_places(pipeline),
    }


def tokenization_spec(context: AssetContext) -> dg.MaterializeResult:
    restore_named(context.services, context.pipeline, tokenizer_of(context.pipeline.recipe))
    found = find_tokenizer(context.pipeline, context.services)
    materialized = materialize(context, TOKENIZATION_SPEC, tokenizer_work(context.pipeline, found), found)
    spec = TokenizationSpec.read(materialized.artifact.folder)
    return materialized.result(
        of_tokenization(spec),
        _report_notes(context, materialized),
        {"template": verbatim([spec.template], "jinja"), "spec": dg.MetadataValue.json(spec.model_dump())},
    )


def release_spec(context: AssetContext) -> dg.MaterializeResult:
    restore_named(context.services, context.pipeline, tokenizer_of(context.pipeline.recipe))
    found = find_release(context.pipeline, context.services)
    materialized = materialize(context, RELEASE_SPEC, release_work(context.pipeline, found), found)
    spec, files = materialized.artifact.json(SPEC_FILE), sorted(materialized.artifact.manifest.files)
    return materialized.result(
        of_release_files(files),
        _report_notes(context, materialized),
        {"files": dg.MetadataValue.json(files), "spec": dg.MetadataValue.json(spec)},
    )


def _report_notes(context: AssetContext, materialized: MaterializedArtifact) -> dict[str, dg.MarkdownMetadataValue]:
    """Return the notes on the artifact, if any. A running job logs them itself; for a reused artifact, log them here."""
    notes = materialized.artifact.details.notes
    for note in notes if materialized.reused else ():
        log_message(context.services, context.dagster.log, context.asset, note)
    return {"notes": dg.MetadataValue.md("\n\n".join(notes))} if notes else {}


def frozen_section(context: AssetContext) -> dg.MaterializeResult:
    """Materialize `training_spec` or `evaluation_spec`, from the recipe and the champion or the base model's files."""
    recipe, services = context.pipeline.recipe, context.services
    starts_from_champion = context.asset == AssetName.TRAINING_SPEC and recipe.training.start_from == "champion"
    champion = services.registry.champion(recipe.release.model_name) if starts_from_champion else None
    if champion is not None:
        restore_files(services, champion)
    found = resolve_root(context.pipeline, services, context.asset)
    spec = found.files[SPEC_FILE]
    is_training = context.asset == AssetName.TRAINING_SPEC
    sentence = (
        of_training(TrainingSpec.model_validate(spec))
        if is_training
        else of_evaluation_settings(EvaluationSpec.model_validate(spec))
    )
    kind = TRAINING_SPEC if is_training else EVALUATION_SPEC
    return materialize_resolved(context, kind, found).result(sentence, {}, {"spec": dg.MetadataValue.json(spec)})
