"""Find folders of recipes, and explain why a recipe cannot be loaded."""

import errno
import re
import stat
from pathlib import Path

from pydantic import ValidationError

from training.contract.errors import RecipeError, UsageError
from workflows.recipes.validation_errors import faults

RECIPE_FILE = "defs.yaml"
NAME = re.compile(r"[A-Za-z0-9_-]+")
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def holds_recipe(folder: Path) -> bool:
    """Return whether `folder` holds a recipe's file. Raises UsageError if it cannot be read."""
    try:
        return stat.S_ISREG((folder / RECIPE_FILE).stat().st_mode)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise UsageError(
            f"{folder}: cannot check for a recipe: {error.strerror}; let this user enter the folder, or move it elsewhere",
            "unreadable-folder",
        ) from error


def recipes_in(folder: Path) -> dict[Path, UsageError | None]:
    """Return the folders in `folder` with a recipe, by name, and unreadable folders, each with its error or None.

    Raises UsageError if `folder` cannot be listed. (A glob would silently end at the first unreadable folder.)
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        if error.errno in _NOT_THERE:
            return {}
        raise UsageError(
            f"{folder}: its recipes cannot be listed: {error.strerror}; let this user read the folder",
            "unreadable-folder",
        ) from error
    recipes: dict[Path, UsageError | None] = {}
    for path in paths:
        try:
            if holds_recipe(path):
                recipes[path] = None
        except UsageError as fault:
            if path.name != "lost+found":  # made by the file system
                recipes[path] = fault
    return recipes


def check_name(folder: Path) -> None:
    """Raise RecipeError if a folder's name cannot be the name of a pipeline."""
    if not NAME.fullmatch(folder.name):
        raise RecipeError(
            f"the folder {folder.name!r} gives the pipeline its name; expected letters, digits, _ and - only: rename it",
            "wrong-folder-name",
        )


def cause_in(file: Path, error: BaseException) -> str:
    """Return the root cause of `error`, raised by loading `file`, as lines with their place."""
    while error.__cause__ is not None and not isinstance(error, (ValidationError, RecipeError)):
        error = error.__cause__
    if isinstance(error, ValidationError):
        return "\n".join(faults(error))
    text = str(error).removeprefix("Invariant failed. Description: ") or type(error).__name__
    return text if str(file) in text else f"{file}: {text}"
