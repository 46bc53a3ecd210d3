"""The three sections of a recipe that are frozen as artifacts: what lies below takes these settings from them.

So a policy that is materialized alone is trained with the settings that were last materialized, whatever the recipe says by
then. An asset below that has fields of its own (`reads` in `assets.graph`) takes these from the recipe as Dagster loaded it.
"""

import dagster as dg

from assets.metadata import verbatim
from assets.named_model import tokenizer_of
from assets.pipeline import Pipeline
from assets.realize import Work, realize, realize_found
from assets.step import Step
from assets.version_files import put_back, put_back_named
from assets.world import FoundTokenizer, find_root, find_tokenizer
from assets.written import tokenizer_places


def tokenizer_work(pipeline: Pipeline, found: FoundTokenizer) -> Work:
    """The job that freezes the tokenizer and the template that were found; `named` is for its errors."""
    template = found.located.chat_template
    locations = {
        "tokenizer": str(found.located.folder),
        "chat_template": None if template is None else str(template),
        "named": tokenizer_places(pipeline),
    }
    return Work("tokenizer", found.derivation.settings, locations)


def tokenization_spec(step: Step) -> dg.MaterializeResult:
    put_back_named(step.services, step.pipeline, tokenizer_of(step.pipeline.recipe))
    found = find_tokenizer(step.pipeline, step.services)
    made = realize(step, tokenizer_work(step.pipeline, found), found)
    spec = made.artifact.json("spec.json")
    return made.result(
        {
            "spec": dg.MetadataValue.json(spec),
            "template": verbatim([spec["template"]], "jinja"),
        }
    )


def frozen_section(step: Step) -> dg.MaterializeResult:
    """The body of `training_spec` and `evaluation_spec`, made of the recipe and, if it starts from the champion, of that."""
    recipe, services = step.pipeline.recipe, step.services
    starts_from_champion = step.asset == "training_spec" and recipe.training.start_from == "champion"
    champion = services.registry.champion(recipe.release.model_name) if starts_from_champion else None
    if champion is not None:
        put_back(services, champion)
    found = find_root(step.pipeline, services, step.asset)
    return realize_found(step, found).result({"spec": dg.MetadataValue.json(found.files["spec.json"])})
