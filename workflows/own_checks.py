"""Checks of a person's own: asset checks on assets of a recipe, in Python files beside the recipes of `workflows/defs/`.

Wherever Dagster starts a run (web UI, schedule, automation), it runs them with the assets that they are about. A run of the
command line has to run them too: else a benchmark that a policy fails would keep it from being released there, and not here;
and in the automation's conditions everything below a blocking check waits until that has seen the latest materialization.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import dagster as dg

from assets.pipeline import Pipeline
from training.contract.errors import UsageError
from workflows.component import DEFS
from workflows.recipe_file import RECIPE_FILE, explained

_MODULE = "workflows.defs"


def own_checks(pipeline: Pipeline, module: str = _MODULE, folder: Path = DEFS) -> dg.Definitions:
    """The checks on assets of `pipeline` in the Python files of `module`, which lies in `folder`; with their resources.

    Raises UsageError where a file cannot be loaded: whether it has any is then unknown.
    """
    files = list(_python_files(folder))
    if not files:
        return dg.Definitions()
    tree = dg.ComponentTree.from_module(import_module(module), folder)
    found = dg.Definitions.merge(*(_load(tree, file) for file in files))
    checks = [check for check in found.asset_checks or () if any(_is_of(pipeline, key) for key in check.check_keys)]
    return dg.Definitions(asset_checks=checks, resources=found.resources) if checks else dg.Definitions()


def _load(tree: dg.ComponentTree, file: Path) -> dg.Definitions:
    try:
        return tree.build_defs_at_path(file)
    except Exception as error:  # whatever a person's code raises
        raise UsageError(
            f"{explained(file, error)}; nothing runs until it can be loaded, since it may have checks of this recipe"
        ) from error


def _is_of(pipeline: Pipeline, check: dg.AssetCheckKey) -> bool:
    return bool(check.asset_key.path[0] == pipeline.name)


def _python_files(folder: Path) -> Iterator[Path]:
    """Those that Dagster reads, which follows links; in the folder of a recipe it reads the recipe alone."""
    for place, folders, names in os.walk(folder, followlinks=True):
        if RECIPE_FILE in names:
            folders.clear()
        else:
            yield from (Path(place) / name for name in sorted(names) if name.endswith(".py"))
