"""`type: workflows.PreferenceTuning`: turns a recipe's file into a pipeline, plus one for each variant.

A pipeline has twelve assets, jobs, a schedule and sensors. Its name begins its asset keys and, with `_` for `-`, its job names.
So the names of all pipelines in one folder of recipes must differ.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

import dagster as dg
from pydantic import BaseModel

from assets.factory import build_assets
from assets.inputs.recipe_yaml import check_unambiguous, variant_names
from assets.pipeline.pipeline import Pipeline, identifier
from training.contract.config.variants import RecipeDocument
from training.contract.errors import RecipeError, UsageError
from workflows.orchestration.automation import release_freshness, retraining
from workflows.recipes.recipe_files import RECIPE_FILE, check_name, recipes_in
from workflows.recipes.scaffold import RecipeScaffolder

DEFS = Path(__file__).resolve().parents[1] / "defs"  # the project's recipes, found by name


@dg.scaffold_with(RecipeScaffolder)
class PreferenceTuning(dg.Component):
    """Keeps a preference-tuned language model up to date with its data, its base model and its recipe.

    The attributes are a `RecipeDocument`; Dagster validates them and reports file, line and field of errors. The folder's
    name is the pipeline's name, and begins the names of its variants.
    """

    def __init__(self, pipelines: Sequence[Pipeline]):
        self.pipelines = pipelines

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return RecipeDocument

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        file, is_named = context.path / RECIPE_FILE, context.path.parent == DEFS
        check_unambiguous(file)
        if not isinstance(attributes, RecipeDocument):
            raise RecipeError(
                "`attributes` is missing; expected the recipe: data, reference and release at least", "missing-field"
            )
        check_name(context.path)
        pipelines = [
            Pipeline(context.path.name, recipe.located_at(context.path), file, variant, is_named)
            for variant, recipe in [(None, attributes.recipe), *attributes.resolved().items()]
        ]
        _check_no_clashes(context.path, pipelines)
        return cls(pipelines)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the assets of all pipelines with their jobs, schedules and sensors. Schedules are checked first."""
        runs = [retraining(pipeline) for pipeline in self.pipelines]
        assets = [asset for pipeline in self.pipelines for asset in build_assets(pipeline, release_freshness(pipeline))]
        return dg.Definitions.merge(dg.Definitions(assets=assets), *runs)


def _check_no_clashes(folder: Path, pipelines: Sequence[Pipeline]) -> None:
    """Raise RecipeError if a variant has the name of another one, or of a pipeline in a sibling folder."""
    if len(pipelines) == 1:
        return
    taken: dict[str, str] = {}
    for sibling in _siblings(folder):
        name, variants = sibling.name, variant_names(sibling / RECIPE_FILE)
        taken[identifier(name)] = f"the recipe {name}"
        if name != folder.name:
            taken |= {identifier(f"{name}-{v}"): f"the variant {v} of the recipe {name}" for v in variants}
    for pipeline in pipelines:
        if pipeline.variant is None:
            continue
        if pipeline.identifier in taken:
            raise RecipeError(
                f"{folder / RECIPE_FILE}: variants.{pipeline.variant}: its pipeline would be {pipeline.name}, the name "
                f"of {taken[pipeline.identifier]} (- and _ count as one): rename one of them",
                "duplicate-name",
            )
        taken[pipeline.identifier] = f"the variant {pipeline.variant}"


def _siblings(folder: Path) -> Collection[Path]:
    """Return the recipes in the parent folder, this one included; nothing if that folder cannot be listed."""
    try:
        return recipes_in(folder.parent)
    except UsageError:
        return ()
