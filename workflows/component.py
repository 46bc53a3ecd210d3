"""`type: workflows.PreferenceTuning`: a recipe's file becomes twelve assets, a job, a schedule and a sensor."""

import re
from typing import Self

import dagster as dg
from pydantic import BaseModel

from assets import data, evaluation, policy, reference, release, sources, specs
from assets.pipeline import Pipeline
from training.contract.errors import RecipeError
from training.contract.recipe import Recipe
from workflows.automation import retraining
from workflows.recipe_file import refuse_repeated_keys

RECIPE_FILE = "defs.yaml"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BUILDERS = (
    sources.preference_source,
    sources.base_model,
    specs.tokenization_spec,
    specs.training_spec,
    specs.evaluation_spec,
    data.raw_preferences,
    data.tokenized_pairs,
    reference.reference_model,
    reference.reference_logprobs,
    policy.policy,
    evaluation.evaluation,
    release.released_model,
)


class PreferenceTuning(dg.Component):
    """Keeps a preference-tuned language model up to date with its data, its base model and its recipe.

    The attributes are a `Recipe`; Dagster validates them and names file, line and field of what is wrong. The folder's
    name is the pipeline's.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return Recipe

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        refuse_repeated_keys(context.path / RECIPE_FILE)
        if not isinstance(attributes, Recipe):
            raise RecipeError("`attributes` is missing; it holds the recipe: data, reference and release at least")
        if not _NAME.fullmatch(context.path.name):
            raise RecipeError(
                f"the folder {context.path.name!r} gives the pipeline its name; expected letters, digits, _ and - only"
            )
        return cls(Pipeline(context.path.name, attributes.located_at(context.path)))

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return pipeline_definitions(self.pipeline)


def pipeline_definitions(pipeline: Pipeline) -> dg.Definitions:
    """The assets of a pipeline with its job, schedule and sensor."""
    assets = [build(pipeline) for build in _BUILDERS]
    return dg.Definitions.merge(dg.Definitions(assets=assets), retraining(pipeline))
