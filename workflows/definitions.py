"""The Definitions object: every recipe under `workflows/defs/`, and those in PEDIGREE_RECIPES.

If PEDIGREE_ONLY_RECIPES lists recipes, only these are shown, with the checks and sensors for them from Python files in
`workflows/defs/`. In an installed package, neither `workflows/defs/` nor a Dagster project exists.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import dagster as dg

from assets.inputs.recipe_yaml import TYPE, check_no_foreign_parts, types_in
from training.contract.errors import RecipeError
from workflows.commands.user_checks import assets_built_for
from workflows.orchestration.pool_wait import wait_patiently
from workflows.orchestration.resources import io_manager, pedigree_home, services
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import ExtraRecipe, extra_recipes, load_recipes, recipe_problem, shows_project
from workflows.recipes.placeholder import placeholder_definitions
from workflows.recipes.recipe_files import RECIPE_FILE, cause_in


@dg.definitions
def defs() -> dg.Definitions:
    """Return all pipelines. Steps run in the process of their run: heavy work has separate jobs anyway.

    Each run's process loads these definitions too, so this is the place to install our waiting for pools.
    """
    wait_patiently(pedigree_home)
    listed = [definitions_of(extra) for extra in extra_recipes()]
    found = dg.Definitions.merge(*([_project_definitions(listed)] if DEFS.is_dir() else []), *listed)
    managers = {} if "io_manager" in (found.resources or {}) else {"io_manager": io_manager}  # or the user's own
    own = dg.Definitions(resources={"services": services, **managers}, executor=dg.in_process_executor)
    return dg.Definitions.merge(found, own)


def _project_definitions(listed: Sequence[dg.Definitions]) -> dg.Definitions:
    """Return all definitions of `workflows/defs/`; if only `listed` is shown, those for its assets."""
    if shows_project():
        return definitions_in(DEFS.parent)
    assets = [asset for some in listed for asset in some.assets or () if isinstance(asset, dg.AssetsDefinition)]
    return assets_built_for({key for asset in assets for key in asset.keys})


def definitions_of(extra: ExtraRecipe) -> dg.Definitions:
    """Return the recipe with its variants, or a placeholder if it is invalid, so other recipes still load."""
    if extra.fault is not None:
        return placeholder_definitions(extra.name, extra.fault)
    try:
        return dg.Definitions.merge(*(loaded.definitions for loaded in load_recipes(extra.folder)))
    except Exception as error:  # Dagster finds some errors only when it builds assets
        return placeholder_definitions(extra.name, RecipeError(cause_in(extra.folder / RECIPE_FILE, error)))


def definitions_in(folder: Path) -> dg.Definitions:
    """Return the definitions of the folder `defs` in `folder`. Raises RecipeError instead of Dagster's or pydantic's errors."""
    for file in _recipe_files(folder):
        check_no_foreign_parts(file)
    try:
        return dg.load_from_defs_folder(path_within_project=folder)
    except Exception:
        if fault := _find_fault(folder):
            raise fault from None
        raise


def _find_fault(folder: Path) -> RecipeError | None:
    """Return the error of the first invalid recipe, or of a file meant as one; None if all are valid."""
    files = [file for file in _recipe_files(folder) if not ((types := types_in(file)) and all(map(_is_foreign, types)))]
    return next(filter(None, (recipe_problem(file.parent) for file in files)), None)


def _recipe_files(folder: Path) -> list[Path]:
    """Return the files read by Dagster. It follows links; a glob would not."""
    folders = os.walk(folder / "defs", followlinks=True)
    return sorted(Path(parent) / RECIPE_FILE for parent, _, names in folders if RECIPE_FILE in names)


def _is_foreign(name: str) -> bool:
    """Return whether `name` is the type of another component: Dagster validates these."""
    module, _, of_class = name.rpartition(".")
    try:
        return name != TYPE and issubclass(getattr(import_module(module), of_class), dg.Component)
    except Exception:  # the import may fail in any way; Dagster has tried it before
        return False
