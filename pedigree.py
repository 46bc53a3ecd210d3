"""The Python interface, `import pedigree` (docs/reference/python.md), and the entry point of the command `pedigree`.

    recipe = pedigree.load_recipe("demo")
    recipe.run()
    recipe.table("evaluation").to_pandas()

The command itself is in `workflows.cli.main`, the interface in `workflows.api`. An interface name is imported when it is used:
it needs Dagster, and `pedigree --help` does not.
"""

import os
import platform
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from training.contract.errors import PedigreeError, RecipeError, UsageError
from training.contract.system.imports import import_without_gc
from workflows.cli import main as cli

if TYPE_CHECKING:
    from training.contract.store.artifact import Artifact
    from workflows.api.model_version import ModelVersion
    from workflows.api.recipe import Recipe, load_recipe
    from workflows.commands.plan import PlannedAsset
    from workflows.commands.run_report import AssetRun, CheckRun, RunReport
    from workflows.state.status import AssetStatus

__all__ = [
    "Artifact",
    "AssetRun",
    "AssetStatus",
    "CheckRun",
    "ModelVersion",
    "PedigreeError",
    "PlannedAsset",
    "Recipe",
    "RecipeError",
    "RunReport",
    "UsageError",
    "load_recipe",
]
_MODULES = {
    "Artifact": "training.contract.store.artifact",
    "AssetRun": "workflows.commands.run_report",
    "AssetStatus": "workflows.state.status",
    "CheckRun": "workflows.commands.run_report",
    "ModelVersion": "workflows.api.model_version",
    "PlannedAsset": "workflows.commands.plan",
    "Recipe": "workflows.api.recipe",
    "RunReport": "workflows.commands.run_report",
    "load_recipe": "workflows.api.recipe",
}

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_without_gc(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)


def main() -> None:
    check_linux()
    open_standard_streams()
    cli.main()


def check_linux() -> None:
    """Exit unless this is Linux: only there does the kernel end jobs with their launcher (contract/system/process.py)."""
    if sys.platform != "linux":
        sys.exit(
            f"error: Pedigree runs on Linux, and this is {platform.system()}: ending a job's processes needs Linux. Use a "
            "Linux container or virtual machine (on Windows WSL 2)"
        )


def open_standard_streams() -> None:
    """Reopen closed standard streams on /dev/null.

    Otherwise the next opened file, such as a database, gets one of their descriptors, and libraries print into it.
    """
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # the next file gets the lowest free descriptor
        if getattr(sys, name) is None:
            devnull = open(os.devnull, mode, encoding="utf-8")
            os.set_inheritable(devnull.fileno(), True)
            setattr(sys, name, devnull)
    if isinstance(sys.stdout, TextIOWrapper):  # escape unencodable characters, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
