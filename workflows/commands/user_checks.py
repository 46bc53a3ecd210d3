"""Checks of a person's own: asset checks on assets of a recipe, in Python files beside the recipes of `workflows/defs/`.

Wherever Dagster starts a run (web UI, schedule, automation), it runs them with the assets that they are about. A run of the
command line has to run them too: else a benchmark that a policy fails would keep it from being released there, and not here;
and in the automation's conditions everything below a blocking check waits until that has seen the latest materialization.
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

from assets.pipeline.pipeline import Pipeline
from training.contract.errors import RecipeError, UsageError
from workflows.recipes.component import DEFS
from workflows.recipes.yaml_file import RECIPE_FILE, TYPE, types_in

_MODULE = "workflows.defs"
_Check = dg.AssetsDefinition  # what a component makes of one; those of a file are of a class below it


@dataclass(frozen=True)
class UserChecks:
    """The checks on assets of one pipeline that its own steps do not make, in `folder`, with the resources they may need."""

    folder: Path
    checks: list[_Check] = field(default_factory=list)
    resources: Mapping[str, Any] = field(default_factory=dict)

    @property
    def definitions(self) -> dg.Definitions:
        return dg.Definitions(asset_checks=self.checks, resources=self.resources if self.checks else None)

    def steps(self, key: dg.AssetKey) -> list[str]:
        """The steps that check the asset `key`."""
        return [check.op.name for check in self.checks if key in _checked(check)]

    def pools(self, keys: Collection[dg.AssetKey]) -> set[str]:
        """The pools of the checks on some of the assets `keys`."""
        return {check.op.pool for check in self.checks if check.op.pool and not _checked(check).isdisjoint(keys)}

    def explaining(self, pipeline: Pipeline) -> AbstractContextManager[None]:
        """Raises UsageError where Dagster cannot run `pipeline` with these checks, as where two have one name."""
        return _explaining(self.folder, pipeline) if self.checks else nullcontext()


def find_user_checks(pipeline: Pipeline, module: str = _MODULE, folder: Path = DEFS) -> UserChecks:
    """The checks on assets of `pipeline` that `module`, which lies in `folder`, declares beside recipes.

    Raises UsageError where a file cannot be loaded: whether it has any is then unknown.
    """
    loaded = _loaded(module, folder)
    if not loaded:
        return UserChecks(folder)
    with _explaining(folder, pipeline):
        found = dg.Definitions.merge(*loaded)
    checks = [check for check in _declared(found) if any(key.path[0] == pipeline.name for key in _checked(check))]
    return UserChecks(folder, checks, found.resources or {})


def assets_built_for(keys: Collection[dg.AssetKey], module: str = _MODULE, folder: Path = DEFS) -> dg.Definitions:
    """Return what `module`, which lies in `folder`, declares beside recipes for the assets `keys` alone.

    These are checks on them, and the sensors that start nothing, such as those that tell of runs. Whatever else is declared may
    name assets of other recipes. Raises UsageError if a file cannot be loaded.
    """
    found = dg.Definitions.merge(*_loaded(module, folder))
    return dg.Definitions(
        asset_checks=[check for check in _declared(found) if not _checked(check).isdisjoint(keys)],
        sensors=[sensor for sensor in found.sensors or () if not sensor.targets],
        resources=found.resources,
    )


def _loaded(module: str, folder: Path) -> list[dg.Definitions]:
    """Return what each file beside recipes declares."""
    places = list(_places_beside_recipes(folder))
    if not places:
        return []
    tree = dg.ComponentTree.from_module(import_module(module), folder)
    return [_load(tree, place) for place in places]


def _declared(found: dg.Definitions) -> list[_Check]:
    """Return the checks in `found`."""
    among_assets = [each for each in found.assets or () if isinstance(each, dg.AssetChecksDefinition)]
    return [*(found.asset_checks or ()), *among_assets]


@contextmanager
def _explaining(folder: Path, pipeline: Pipeline) -> Iterator[None]:
    try:
        yield
    except dg.DagsterError as error:
        raise UsageError(f"{pipeline.name} cannot be run with the checks in {folder}: {error}") from error


def _checked(check: _Check) -> set[dg.AssetKey]:
    return {key.asset_key for key in check.check_keys}


def _load(tree: dg.ComponentTree, place: Path) -> dg.Definitions:
    try:
        return tree.build_defs_at_path(place)
    except (Exception, SystemExit) as error:  # whatever a person's code raises
        raise UsageError(
            f"{_told(place, error)}; nothing runs until it can be loaded, since it may have checks of this recipe"
        ) from error


def _told(place: Path, error: BaseException) -> str:
    """The root cause of `error` with its type, and with its line where that is in the file `place`."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(place)]
    return f"{place}{f':{lines[-1]}' if lines else ''}: {type(error).__name__}: {error}"


def _places_beside_recipes(folder: Path) -> Iterator[Path]:
    """Python files, and folders of components of other types. Dagster follows links, and reads nothing that is hidden."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        if RECIPE_FILE in names:
            folders.clear()
            if not _is_recipe(Path(place) / RECIPE_FILE):
                yield Path(place)
        else:
            yield from (Path(place) / name for name in sorted(names) if name.endswith(".py") and name[0] != ".")


def _is_recipe(file: Path) -> bool:
    try:
        return TYPE in types_in(file)
    except RecipeError:  # one that is wrong stops nobody else's run
        return True
