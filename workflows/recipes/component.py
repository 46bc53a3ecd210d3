"""`type: workflows.PreferenceTuning`: a recipe's file becomes a pipeline, and one more for each of its variants.

A pipeline is twelve assets, jobs, a schedule and sensors. Its asset keys, and with `_` for `-` the names of its jobs, begin
with its name, so the names of all pipelines in one folder of recipes must differ.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

import dagster as dg
from pydantic import BaseModel

from assets.factory import declare_assets
from assets.pipeline.pipeline import Pipeline, identifier
from training.contract.config.variants import RecipeFile
from training.contract.errors import RecipeError, UsageError
from workflows.orchestration.automation import retraining
from workflows.recipes.scaffold import RecipeScaffolder
from workflows.recipes.yaml_file import (
    RECIPE_FILE,
    recipes_in,
    refuse_half_characters,
    refuse_name,
    refuse_old_numbers,
    refuse_repeated_keys,
    variant_names,
)

DEFS = Path(__file__).resolve().parents[1] / "defs"  # the project's own recipes, which their names lead to


@dg.scaffold_with(RecipeScaffolder)
class PreferenceTuning(dg.Component):
    """Keeps a preference-tuned language model up to date with its data, its base model and its recipe.

    The attributes are a `RecipeFile`; Dagster validates them and names file, line and field of what is wrong. The folder's
    name is the pipeline's, and begins those of its variants.
    """

    def __init__(self, pipelines: Sequence[Pipeline]):
        self.pipelines = pipelines

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return RecipeFile

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        file, is_named = context.path / RECIPE_FILE, context.path.parent == DEFS
        refuse_half_characters(file)
        refuse_old_numbers(file)
        refuse_repeated_keys(file)
        if not isinstance(attributes, RecipeFile):
            raise RecipeError("`attributes` is missing; it holds the recipe: data, reference and release at least")
        refuse_name(context.path)
        pipelines = [
            Pipeline(context.path.name, recipe.located_at(context.path), file, variant, is_named)
            for variant, recipe in [(None, attributes.recipe), *attributes.resolved().items()]
        ]
        _refuse_clashes(context.path, pipelines)
        return cls(pipelines)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The assets of all pipelines with their jobs, schedules and sensors."""
        assets = [asset for pipeline in self.pipelines for asset in declare_assets(pipeline)]
        return dg.Definitions.merge(dg.Definitions(assets=assets), *map(retraining, self.pipelines))


def _refuse_clashes(folder: Path, pipelines: Sequence[Pipeline]) -> None:
    """Raises RecipeError for a variant that shares its name with another one, or with a pipeline of a sibling folder."""
    if len(pipelines) == 1:
        return
    taken: dict[str, str] = {}
    for place in _siblings(folder):
        name, variants = place.name, variant_names(place / RECIPE_FILE)
        taken[identifier(name)] = f"the recipe {name}"
        if name != folder.name:
            taken |= {identifier(f"{name}-{v}"): f"the variant {v} of the recipe {name}" for v in variants}
    for pipeline in pipelines:
        if pipeline.variant is None:
            continue
        if pipeline.identifier in taken:
            raise RecipeError(
                f"{folder / RECIPE_FILE}: variants.{pipeline.variant}: its pipeline would be {pipeline.name}, the name "
                f"of {taken[pipeline.identifier]} (- and _ count as one): rename one of them"
            )
        taken[pipeline.identifier] = f"the variant {pipeline.variant}"


def _siblings(folder: Path) -> Collection[Path]:
    """The recipes beside that in `folder`, and itself; none where the folder around them may be entered, but not listed."""
    try:
        return recipes_in(folder.parent)
    except UsageError:
        return ()
