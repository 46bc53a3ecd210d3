"""The one Definitions object: every recipe under `workflows/defs/`, and those that PEDIGREE_RECIPES lists.

Where this was installed as a package, there are no recipes beside it, and no project of Dagster's around it.
"""

from pathlib import Path

import dagster as dg

from training.contract.errors import RecipeError
from workflows.component import DEFS
from workflows.recipe_file import RECIPE_FILE, refuse_foreign_parts
from workflows.recipes import extra_recipes, load_recipes
from workflows.resources import services
from workflows.wrong_recipe import stand_in


@dg.definitions
def defs() -> dg.Definitions:
    """All pipelines side by side. Steps run in the process of their run: the heavy work is in jobs of its own anyway."""
    return dg.Definitions.merge(
        *([definitions_in(DEFS.parent)] if DEFS.is_dir() else []),
        *map(definitions_of, extra_recipes()),
        dg.Definitions(resources={"services": services}, executor=dg.in_process_executor),
    )


def definitions_of(folder: Path) -> dg.Definitions:
    """The recipe in `folder` and its variants, or what stands in for them where that is wrong: others live beside it."""
    try:
        return dg.Definitions.merge(*(loaded.definitions for loaded in load_recipes(folder)))
    except RecipeError as fault:
        return stand_in(folder, fault)


def definitions_in(folder: Path) -> dg.Definitions:
    """What the folder `defs` in `folder` declares. Raises RecipeError in our words, where Dagster's would be pydantic's."""
    for file in folder.glob(f"defs/**/{RECIPE_FILE}"):
        refuse_foreign_parts(file)
    try:
        return dg.load_from_defs_folder(path_within_project=folder)
    except Exception:
        if fault := _fault(folder):
            raise fault from None
        raise


def _fault(folder: Path) -> RecipeError | None:
    for file in sorted(folder.glob(f"defs/*/{RECIPE_FILE}")):
        try:
            load_recipes(file.parent)
        except RecipeError as fault:
            return fault
    return None
