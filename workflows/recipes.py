"""Finding recipes: a name under `workflows/defs/`, or the path of any folder that holds a `defs.yaml`."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import dagster as dg

from assets.pipeline import Pipeline
from training.contract.errors import RecipeError, UsageError
from workflows.component import RECIPE_FILE, PreferenceTuning, pipeline_definitions
from workflows.recipe_file import explained

DEFS = Path(__file__).parent / "defs"


@dataclass(frozen=True)
class LoadedRecipe:
    pipeline: Pipeline
    definitions: dg.Definitions


def recipe_folder(text: str) -> Path:
    """The folder that `text` names. Raises UsageError with the known names if there is none."""
    for folder in (DEFS / text, Path(text)):
        if (folder / RECIPE_FILE).is_file():
            return folder.resolve()
    known = ", ".join(sorted(p.parent.name for p in DEFS.glob(f"*/{RECIPE_FILE}"))) or "none"
    raise UsageError(f"{text!r} is neither a recipe of this project ({known}) nor a folder with a {RECIPE_FILE}")


def load_recipe(folder: Path) -> LoadedRecipe:
    """The pipeline in `folder` and its definitions. Raises RecipeError with file, line and field of what is wrong."""
    place = ModuleType(folder.name)
    place.__path__ = [str(folder)]
    place.__file__ = None
    tree = dg.ComponentTree.from_module(place, folder)
    try:
        components = tree.get_all_components(of_type=PreferenceTuning)
        definitions = [pipeline_definitions(component.pipeline) for component in components]
    except Exception as error:  # Dagster wraps whatever is wrong in a file in exceptions of many kinds
        raise RecipeError(explained(folder / RECIPE_FILE, error)) from error
    if len(components) != 1:
        raise RecipeError(
            f"{folder / RECIPE_FILE} holds {len(components)} components of type workflows.PreferenceTuning, expected one"
        )
    return LoadedRecipe(components[0].pipeline, definitions[0])


def extra_recipes() -> list[Path]:
    """The folders in PEDIGREE_RECIPES, separated like PATH: recipes outside the project that the web UI shall show."""
    listed = os.environ.get("PEDIGREE_RECIPES", "")
    return [recipe_folder(text) for text in listed.split(os.pathsep) if text]
