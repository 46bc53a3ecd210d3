"""The user's checks: asset checks for a recipe, in Python files beside the recipes in `workflows/defs/`.

If Dagster starts a run (web UI, schedule, automation), it runs them with their assets. A run from the command line must do so
too. Otherwise a failed benchmark would block a release there, but not here. Automation conditions also wait until a blocking
check has run on the latest materialization.
"""

import os
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import dagster as dg

from assets.inputs.recipe_yaml import TYPE, types_in
from assets.pipeline.pipeline import Pipeline
from training.contract.errors import RecipeError, UsageError
from workflows.recipes.component import DEFS
from workflows.recipes.recipe_files import RECIPE_FILE

_MODULE = "workflows.defs"
_Check = dg.AssetsDefinition  # the class of a component's checks; those in files have a subclass


@dataclass(frozen=True)
class UserChecks:
    """The user's checks on assets of one pipeline, in `folder`, with their resources."""

    folder: Path
    checks: list[_Check] = field(default_factory=list)
    resources: Mapping[str, Any] = field(default_factory=dict)

    @property
    def definitions(self) -> dg.Definitions:
        return dg.Definitions(asset_checks=self.checks, resources=self.resources if self.checks else None)

    def steps(self, key: dg.AssetKey) -> list[str]:
        """Return the steps for checks on the asset `key`."""
        return [check.op.name for check in self.checks if key in _checked(check)]

    def pools(self, keys: Collection[dg.AssetKey]) -> set[str]:
        """Return the pools of the checks on some of the assets `keys`."""
        return {check.op.pool for check in self.checks if check.op.pool and not _checked(check).isdisjoint(keys)}

    def explaining(self, pipeline: Pipeline) -> AbstractContextManager[None]:
        """Raise UsageError if Dagster cannot run `pipeline` with these checks, for example if two share a name."""
        return _explaining(self.folder, pipeline) if self.checks else nullcontext()


def find_user_checks(pipeline: Pipeline, module: str = _MODULE, folder: Path = DEFS) -> UserChecks:
    """Return the checks on assets of `pipeline` in the Python files of `module`, located in `folder`.

    Raises UsageError if a file cannot be loaded: it may contain such checks.
    """
    loaded = _load_files(module, folder)
    if not loaded:
        return UserChecks(folder)
    with _explaining(folder, pipeline):
        found = dg.Definitions.merge(*loaded)
    checks = [check for check in _asset_checks(found) if any(key.path[0] == pipeline.name for key in _checked(check))]
    return UserChecks(folder, checks, found.resources or {})


def assets_built_for(keys: Collection[dg.AssetKey], module: str = _MODULE, folder: Path = DEFS) -> dg.Definitions:
    """Return the definitions in the files of `module`, located in `folder`, for the assets `keys` alone.

    These are checks on the assets, and sensors without jobs, such as notifications. Other definitions may name assets of
    other recipes. Raises UsageError if a file cannot be loaded.
    """
    found = dg.Definitions.merge(*_load_files(module, folder))
    return dg.Definitions(
        asset_checks=[check for check in _asset_checks(found) if not _checked(check).isdisjoint(keys)],
        sensors=[sensor for sensor in found.sensors or () if not sensor.targets],
        resources=found.resources,
    )


def _load_files(module: str, folder: Path) -> list[dg.Definitions]:
    """Return the definitions of each file beside recipes."""
    paths = list(_paths_beside_recipes(folder))
    if not paths:
        return []
    tree = dg.ComponentTree.from_module(import_module(module), folder)
    return [_load_path(tree, path) for path in paths]


def _asset_checks(found: dg.Definitions) -> list[_Check]:
    """Return the checks in `found`."""
    among_assets = [asset for asset in found.assets or () if isinstance(asset, dg.AssetChecksDefinition)]
    return [*(found.asset_checks or ()), *among_assets]


@contextmanager
def _explaining(folder: Path, pipeline: Pipeline) -> Iterator[None]:
    try:
        yield
    except dg.DagsterError as error:
        raise UsageError(
            f"{pipeline.name} cannot be run with the checks in {folder}: {error}", "wrong-user-checks"
        ) from error


def _checked(check: _Check) -> set[dg.AssetKey]:
    return {key.asset_key for key in check.check_keys}


def _load_path(tree: dg.ComponentTree, path: Path) -> dg.Definitions:
    try:
        return tree.build_defs_at_path(path)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UsageError(
            f"{_root_cause(path, error)}; nothing runs until it can be loaded, as it may have checks of this recipe",
            "user-file-failed",
        ) from error


def _root_cause(path: Path, error: BaseException) -> str:
    """Return the root cause of `error` with its type, and with its line if it is in the file `path`."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}{f':{lines[-1]}' if lines else ''}: {type(error).__name__}: {error}"


def _paths_beside_recipes(folder: Path) -> Iterator[Path]:
    """Yield Python files, and folders of other components. Dagster follows links, and ignores hidden files."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        if RECIPE_FILE in names:
            folders.clear()
            if not _is_recipe(Path(parent) / RECIPE_FILE):
                yield Path(parent)
        else:
            yield from (Path(parent) / name for name in sorted(names) if name.endswith(".py") and name[0] != ".")


def _is_recipe(file: Path) -> bool:
    try:
        return TYPE in types_in(file)
    except RecipeError:  # an invalid recipe must not stop other runs
        return True
