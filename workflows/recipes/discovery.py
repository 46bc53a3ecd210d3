"""Finding recipes: a name under `workflows/defs/`, or the path of any folder that holds a `defs.yaml`.

A file holds one pipeline or more: the recipe's own and those of its variants, which are named behind it, `demo/hinge`.
"""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType

import dagster as dg

from assets.factory import build_assets
from assets.pipeline.pipeline import Pipeline, identifier
from training.contract.errors import RecipeError, UsageError
from training.contract.identity.fingerprint import check_text, short
from workflows.orchestration.automation import retraining
from workflows.recipes.component import DEFS, PreferenceTuning
from workflows.recipes.yaml_file import (
    NAME,
    RECIPE_FILE,
    cause_in,
    check_no_foreign_parts,
    check_one_recipe,
    holds_recipe,
    recipes_in,
    variant_names,
)

# Lists of folders of recipes, separated like PATH: those shown beside the project's, and those shown in their place.
BESIDE_VARIABLE, ALONE_VARIABLE = "PEDIGREE_RECIPES", "PEDIGREE_ONLY_RECIPES"


@dataclass(frozen=True)
class LoadedRecipe:
    """`automation`: jobs, schedule and sensors of the pipeline."""

    pipeline: Pipeline
    automation: dg.Definitions

    @cached_property
    def definitions(self) -> dg.Definitions:
        """All that Dagster is told of it. Made when it is asked for, since that takes long: only a run asks, of one variant."""
        return dg.Definitions.merge(dg.Definitions(assets=build_assets(self.pipeline)), self.automation)


def find_recipes(text: str) -> list[LoadedRecipe]:
    """The recipe that `text` names and its variants; where `/` and a name stand behind it, that variant alone.

    Raises what loading raises.
    """
    above, _, variant = text.rstrip("/").rpartition("/")
    if _folder(text) is None and (folder := _folder(above)) is not None:
        return [load_recipe(folder, variant)]
    return load_recipes(recipe_folder(text))


def recipe_folder(text: str) -> Path:
    """The folder that `text` names. Raises UsageError with the known names if there is none."""
    if (folder := _folder(text)) is not None:
        return folder
    known = ", ".join(place.name for place in recipes_in(DEFS)) or "none"
    raise UsageError(f"{text!r} is neither a recipe of this project ({known}) nor a folder with a {RECIPE_FILE}")


def recipe_folders(text: str) -> dict[Path, UsageError | None]:
    """The recipe's folder that `text` names, or those in the folder that it names, with what keeps one from being seen.

    Where it is both, those inside are meant: the file above them, saved at the wrong place, would hide them. Raises UsageError
    if there is none.
    """
    own = _folder(text)
    try:
        inside = recipes_in(own or Path(text))
    except UsageError:
        if own is None:
            raise
        inside = {}  # it may be entered, but not listed
    found = {Path(os.path.realpath(place)): fault for place, fault in inside.items()}
    if own is None:
        return found or {recipe_folder(text): None}
    if not found:
        return {own: None}
    others = ", ".join(place.name for place in inside)
    fault = UsageError(
        f"{own} is a recipe and holds others ({others}): move its {RECIPE_FILE} into a folder of its own, or them"
    )
    return {own: fault, **found}


def recipe_place(text: str) -> Path:
    """Return the folder that `text` names, for PEDIGREE_ONLY_RECIPES. It holds a recipe, or several, and may get more later.

    Raises UsageError if there is none, or if it cannot stand in that list.
    """
    recipe_folders(text)
    place = _folder(text) or Path(text).resolve()
    if os.pathsep in str(place):
        raise UsageError(f"{place} has a {os.pathsep!r} in it, which separates folders in a list of them: rename it")
    return place


def load_recipe(folder: Path, variant: str | None = None) -> LoadedRecipe:
    """The recipe in `folder`, or its variant. Raises UsageError with the known variants, and as `load_recipes` does."""
    found = {loaded.pipeline.variant: loaded for loaded in load_recipes(folder)}
    if variant not in found:
        known = ", ".join(name for name in found if name is not None) or "none"
        raise UsageError(f"the recipe {folder.name} has no variant {variant!r}; there is {known}")
    return found[variant]


def load_recipes(folder: Path) -> list[LoadedRecipe]:
    """The recipe in `folder` and its variants, in the order of the file.

    Raises RecipeError with file, line and field of what is wrong.
    """
    check_text(folder, RecipeError)
    check_one_recipe(folder / RECIPE_FILE)
    check_no_foreign_parts(folder / RECIPE_FILE)
    place = ModuleType(folder.name)
    place.__path__ = [str(folder)]
    place.__file__ = None
    tree = dg.ComponentTree.from_module(place, folder)
    try:
        components = tree.get_all_components(of_type=PreferenceTuning)
        pipelines = [pipeline for component in components for pipeline in component.pipelines]
        found = [LoadedRecipe(pipeline, retraining(pipeline)) for pipeline in pipelines]
    except Exception as error:  # Dagster wraps whatever is wrong in a file in exceptions of many kinds
        raise RecipeError(cause_in(folder / RECIPE_FILE, error)) from error
    return found


def recipe_problem(folder: Path) -> RecipeError | None:
    """What keeps the recipe in `folder` from being loaded."""
    try:
        load_recipes(folder)
    except RecipeError as fault:
        return fault
    return None


@dataclass(frozen=True)
class ExtraRecipe:
    """A listed recipe that the web UI is to show as `name`.

    `fault` keeps it from being shown, whatever its defs.yaml holds. There are two: the folder has no recipe, or another recipe
    already has its name or the name of one of its variants.
    """

    folder: Path
    name: str
    fault: UsageError | None


def shows_project() -> bool:
    """Return whether the project's own recipes are shown: they are unless PEDIGREE_ONLY_RECIPES lists others."""
    return not os.environ.get(ALONE_VARIABLE)


def extra_recipes() -> list[ExtraRecipe]:
    """Return the recipes of the list that counts. Of folders with one name the first stands for all.

    PEDIGREE_ONLY_RECIPES counts if it is set, else PEDIGREE_RECIPES, without those of the project, which are shown anyway.
    """
    of_project = recipes_in(DEFS) if shows_project() else {}
    named = {identifier(name): folder for folder in of_project for name in _names(folder)}
    found: dict[Path, ExtraRecipe] = {}
    for folder, fault in _listed_recipes().items():
        if folder in of_project:
            continue
        first = named.setdefault(identifier(folder.name), folder)
        if first == folder:
            name = folder.name if NAME.fullmatch(folder.name) else _spare_name(folder)
            found[folder] = ExtraRecipe(folder, name, fault)
        elif first in found:
            found[first] = replace(found[first], fault=_namesakes(folder.name, first, folder))
        else:  # the project's own, which goes on
            found[folder] = ExtraRecipe(folder, _spare_name(folder), _namesakes(folder.name, first, folder))
    for folder in [folder for folder, extra in found.items() if extra.fault is None]:
        for name in _names(folder):
            if (owner := named.setdefault(identifier(name), folder)) != folder:
                found[folder] = replace(found[folder], fault=_namesakes(name, owner, folder))
    return list(found.values())


def _spare_name(folder: Path) -> str:
    """A name that no other folder has, where its own cannot be had."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', folder.name)}_{short(digest)}"


def _names(folder: Path) -> list[str]:
    """Of the recipe in `folder` and of its variants, as asset keys begin with them."""
    return [folder.name, *(f"{folder.name}-{variant}" for variant in variant_names(folder / RECIPE_FILE))]


def _namesakes(name: str, first: Path, second: Path) -> UsageError:
    return UsageError(
        f"{name} is the name of a recipe or a variant in {first} and of one in {second} (- and _ count as one): rename one"
    )


def _listed_recipes() -> dict[Path, UsageError | None]:
    variable = BESIDE_VARIABLE if shows_project() else ALONE_VARIABLE
    listed: dict[Path, UsageError | None] = {}
    for text in filter(None, os.environ.get(variable, "").split(os.pathsep)):
        try:
            listed |= recipe_folders(text)
        except UsageError as gone:
            listed[Path(os.path.realpath(text))] = UsageError(f"{variable}: {gone}")
    return listed


def _folder(text: str) -> Path | None:
    """What begins with a dot is a path, so that `./demo` is the folder here whatever the project has.

    The recipe's file stands for its folder.
    """
    if Path(text).name == RECIPE_FILE:
        text = str(Path.cwd() / Path(text).parent)
    folders = (*([] if text.startswith(".") else [DEFS / text]), Path(text)) if text else ()
    return next((folder.resolve() for folder in folders if holds_recipe(folder)), None)
