"""The one Definitions object: every recipe under `workflows/defs/`, and those that PEDIGREE_RECIPES lists.

If PEDIGREE_ONLY_RECIPES lists recipes, these are shown alone. Python files in `workflows/defs/` then give what belongs to them.
If this was installed as a package, there are no recipes beside it, and no project of Dagster's around it.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import dagster as dg

from training.contract.errors import RecipeError
from workflows.commands.user_checks import assets_built_for
from workflows.orchestration.pool_wait import wait_patiently
from workflows.orchestration.resources import pedigree_home, services
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import ExtraRecipe, extra_recipes, load_recipes, recipe_problem, shows_project
from workflows.recipes.placeholder import placeholder_definitions
from workflows.recipes.yaml_file import RECIPE_FILE, TYPE, cause_in, check_no_foreign_parts, types_in


@dg.definitions
def defs() -> dg.Definitions:
    """All pipelines side by side. Steps run in the process of their run: the heavy work is in jobs of its own anyway.

    That process loads these definitions too, so it is here that it is told how to wait.
    """
    wait_patiently(pedigree_home)
    listed = [definitions_of(extra) for extra in extra_recipes()]
    return dg.Definitions.merge(
        *([_of_project(listed)] if DEFS.is_dir() else []),
        *listed,
        dg.Definitions(resources={"services": services}, executor=dg.in_process_executor),
    )


def _of_project(listed: Sequence[dg.Definitions]) -> dg.Definitions:
    """Return all that `workflows/defs/` declares, or, if `listed` is shown alone, what files in it declare for that."""
    if shows_project():
        return definitions_in(DEFS.parent)
    assets = [asset for each in listed for asset in each.assets or () if isinstance(asset, dg.AssetsDefinition)]
    return assets_built_for({key for asset in assets for key in asset.keys})


def definitions_of(extra: ExtraRecipe) -> dg.Definitions:
    """The recipe and its variants, or what stands in for them where that is wrong: others live beside it."""
    if extra.fault is not None:
        return placeholder_definitions(extra.name, extra.fault)
    try:
        return dg.Definitions.merge(*(loaded.definitions for loaded in load_recipes(extra.folder)))
    except Exception as error:  # ours, or whatever Dagster finds out only when the assets are made
        return placeholder_definitions(extra.name, RecipeError(cause_in(extra.folder / RECIPE_FILE, error)))


def definitions_in(folder: Path) -> dg.Definitions:
    """What the folder `defs` in `folder` declares. Raises RecipeError in our words, where Dagster's would be pydantic's."""
    for file in _files(folder):
        check_no_foreign_parts(file)
    try:
        return dg.load_from_defs_folder(path_within_project=folder)
    except Exception:
        if fault := _fault(folder):
            raise fault from None
        raise


def _fault(folder: Path) -> RecipeError | None:
    """What is wrong with the first of the recipes, or of what is meant to be one."""
    files = [file for file in _files(folder) if not ((types := types_in(file)) and all(map(_is_foreign, types)))]
    return next(filter(None, (recipe_problem(file.parent) for file in files)), None)


def _files(folder: Path) -> list[Path]:
    """What Dagster reads, which follows links; a glob would not."""
    places = os.walk(folder / "defs", followlinks=True)
    return sorted(Path(place) / RECIPE_FILE for place, _, names in places if RECIPE_FILE in names)


def _is_foreign(name: str) -> bool:
    """Whether `name` is the type of a component that is not ours: those are for Dagster to judge."""
    module, _, of_class = name.rpartition(".")
    try:
        return name != TYPE and issubclass(getattr(import_module(module), of_class), dg.Component)
    except Exception:  # whatever importing it does; Dagster has tried that before
        return False
