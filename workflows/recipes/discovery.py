"""Find recipes: a name under `workflows/defs/`, or the path of any folder with a `defs.yaml`.

A file holds one pipeline or more: for the recipe itself and for its variants, such as `demo/hinge`.
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
from assets.inputs.recipe_yaml import check_no_foreign_parts, check_one_recipe, check_values_fit_tags, variant_names
from assets.pipeline.pipeline import Pipeline, identifier
from training.contract.errors import RecipeError, UsageError
from training.contract.identity.fingerprint import check_text, short
from workflows.orchestration.automation import release_freshness, retraining
from workflows.recipes.component import DEFS, PreferenceTuning
from workflows.recipes.recipe_files import NAME, RECIPE_FILE, cause_in, holds_recipe, recipes_in

# Lists of recipe folders, separated as in PATH: shown beside the project's recipes, or instead of them.
BESIDE_VARIABLE, ALONE_VARIABLE = "PEDIGREE_RECIPES", "PEDIGREE_ONLY_RECIPES"


@dataclass(frozen=True)
class LoadedRecipe:
    """A pipeline with its `automation`: jobs, schedule and sensors."""

    pipeline: Pipeline
    automation: dg.Definitions

    @cached_property
    def definitions(self) -> dg.Definitions:
        """All definitions for Dagster. Built on first use, as it takes long: only a run needs them, for one variant."""
        assets = build_assets(self.pipeline, release_freshness(self.pipeline))
        return dg.Definitions.merge(dg.Definitions(assets=assets), self.automation)


def find_recipes(text: str) -> list[LoadedRecipe]:
    """Return the recipe named by `text` and its variants; for `recipe/variant`, that variant alone.

    Raises the errors of `load_recipes`.
    """
    parent, _, variant = text.rstrip("/").rpartition("/")
    if _folder(text) is None and (folder := _folder(parent)) is not None:
        return [load_recipe(folder, variant)]
    return load_recipes(recipe_folder(text))


def recipe_folder(text: str) -> Path:
    """Return the folder named by `text`. Raises UsageError with the known names for an unknown one."""
    if (folder := _folder(text)) is not None:
        return folder
    known = ", ".join(path.name for path in recipes_in(DEFS)) or "none"
    raise UsageError(
        f"{text!r} is neither a recipe of this project ({known}) nor a folder with a {RECIPE_FILE}", "unknown-recipe"
    )


def recipe_folders(text: str) -> dict[Path, UsageError | None]:
    """Return the recipe folder named by `text`, or the recipe folders in it, each with its problem or None.

    If it is both, the inner ones count: a recipe file saved above them by mistake would hide them. Raises UsageError if both
    are missing.
    """
    named = _folder(text)
    try:
        inside = recipes_in(named or Path(text))
    except UsageError:
        if named is None:
            raise
        inside = {}  # the folder can be entered, but not listed
    found = {Path(os.path.realpath(path)): fault for path, fault in inside.items()}
    if named is None:
        return found or {recipe_folder(text): None}
    if not found:
        return {named: None}
    names = ", ".join(path.name for path in inside)
    fault = UsageError(
        f"{named} is a recipe and holds others ({names}): move its {RECIPE_FILE} into its own folder, or move the others",
        "nested-recipes",
    )
    return {named: fault, **found}


def recipe_place(text: str) -> Path:
    """Return the folder named by `text`, for PEDIGREE_ONLY_RECIPES. It holds one recipe or several; more may be added later.

    Raises UsageError if it lacks a recipe, or cannot be an entry of that list.
    """
    recipe_folders(text)
    path = _folder(text) or Path(text).resolve()
    if os.pathsep in str(path):
        raise UsageError(
            f"{path} contains {os.pathsep!r}, the separator in lists of folders: rename it", "unsupported-path"
        )
    return path


def load_recipe(folder: Path, variant: str | None = None) -> LoadedRecipe:
    """Return the recipe in `folder`, or its variant. Raises UsageError with the known variants, or as `load_recipes`."""
    recipes = {loaded.pipeline.variant: loaded for loaded in load_recipes(folder)}
    if variant not in recipes:
        known = ", ".join(name for name in recipes if name is not None) or "none"
        raise UsageError(f"the recipe {folder.name} has no variant {variant!r}; variants: {known}", "unknown-variant")
    return recipes[variant]


def load_recipes(folder: Path) -> list[LoadedRecipe]:
    """Return the recipe in `folder` and its variants, in the order of the file.

    Raises RecipeError with file, line and field of the error.
    """
    check_text(folder, RecipeError)
    check_one_recipe(folder / RECIPE_FILE)
    check_no_foreign_parts(folder / RECIPE_FILE)
    check_values_fit_tags(folder / RECIPE_FILE)
    module = ModuleType(folder.name)
    module.__path__ = [str(folder)]
    module.__file__ = None
    tree = dg.ComponentTree.from_module(module, folder)
    try:
        components = tree.get_all_components(of_type=PreferenceTuning)
        pipelines = [pipeline for component in components for pipeline in component.pipelines]
        recipes = [LoadedRecipe(pipeline, retraining(pipeline)) for pipeline in pipelines]
    except Exception as error:  # Dagster wraps errors in a file in many kinds of exceptions
        raise RecipeError(cause_in(folder / RECIPE_FILE, error)) from error
    return recipes


def recipe_problem(folder: Path) -> RecipeError | None:
    """Return the error in the recipe in `folder`, or None."""
    try:
        load_recipes(folder)
    except RecipeError as fault:
        return fault
    return None


@dataclass(frozen=True)
class ExtraRecipe:
    """A listed recipe, shown in the web UI as `name`.

    `fault` keeps it from being shown, even if its defs.yaml is valid: the folder lacks a recipe, or another recipe has its
    name or the name of one of its variants.
    """

    folder: Path
    name: str
    fault: UsageError | None


def shows_project() -> bool:
    """Return whether the project's recipes are shown: unless PEDIGREE_ONLY_RECIPES lists others."""
    return not os.environ.get(ALONE_VARIABLE)


def extra_recipes() -> list[ExtraRecipe]:
    """Return the listed recipes. If folders share a name, the first stands for all.

    The list is PEDIGREE_ONLY_RECIPES if it is set, else PEDIGREE_RECIPES without the recipes of the project, which are shown
    anyway.
    """
    project = recipes_in(DEFS) if shows_project() else {}
    owners = {identifier(name): folder for folder in project for name in _pipeline_names(folder)}
    extras: dict[Path, ExtraRecipe] = {}
    for folder, fault in _listed_recipes().items():
        if folder in project:
            continue
        first = owners.setdefault(identifier(folder.name), folder)
        if first == folder:
            name = folder.name if NAME.fullmatch(folder.name) else _spare_name(folder)
            extras[folder] = ExtraRecipe(folder, name, fault)
        elif first in extras:
            extras[first] = replace(extras[first], fault=_duplicate_name(folder.name, first, folder))
        else:  # the first one is the project's, and stays
            extras[folder] = ExtraRecipe(folder, _spare_name(folder), _duplicate_name(folder.name, first, folder))
    for folder in [folder for folder, extra in extras.items() if extra.fault is None]:
        for name in _pipeline_names(folder):
            if (owner := owners.setdefault(identifier(name), folder)) != folder:
                extras[folder] = replace(extras[folder], fault=_duplicate_name(name, owner, folder))
    return list(extras.values())


def _spare_name(folder: Path) -> str:
    """Return a unique name for a folder with an unusable name."""
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', folder.name)}_{short(digest)}"


def _pipeline_names(folder: Path) -> list[str]:
    """Return the names of the recipe in `folder` and of its variants, as in asset keys."""
    return [folder.name, *(f"{folder.name}-{variant}" for variant in variant_names(folder / RECIPE_FILE))]


def _duplicate_name(name: str, first: Path, second: Path) -> UsageError:
    return UsageError(
        f"{name} names a recipe or a variant both in {first} and in {second} (- and _ count as one): rename one",
        "duplicate-name",
    )


def _listed_recipes() -> dict[Path, UsageError | None]:
    variable = BESIDE_VARIABLE if shows_project() else ALONE_VARIABLE
    listed: dict[Path, UsageError | None] = {}
    for text in filter(None, os.environ.get(variable, "").split(os.pathsep)):
        try:
            listed |= recipe_folders(text)
        except UsageError as error:
            listed[Path(os.path.realpath(text))] = UsageError(f"{variable}: {error}")
    return listed


def _folder(text: str) -> Path | None:
    """Return the recipe folder named by `text`, or None. A leading dot marks a path: `./demo` is never the project's `demo`.

    The path of a recipe's file stands for its folder.
    """
    if Path(text).name == RECIPE_FILE:
        text = str(Path.cwd() / Path(text).parent)
    folders = (*([] if text.startswith(".") else [DEFS / text]), Path(text)) if text else ()
    return next((folder.resolve() for folder in folders if holds_recipe(folder)), None)
