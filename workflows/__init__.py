"""The user's side: recipes as Dagster components, the definitions object, and the command `pedigree`.

* `definitions`: the definitions loaded by Dagster.
* `api/`: the Python interface, for notebooks and scripts.
* `cli/`: the command `pedigree`: its options, output, tables and progress.
* `commands/`: the work of `run`, `plan`, `verify`, `compare`, `inspect` and `gc`.
* `recipes/`: finds, reads and validates recipes; proposes settings for new ones.
* `orchestration/`: schedules, sensors, the pool, the folders in PEDIGREE_HOME.
* `servers/`: processes for web pages and models.
* `state/`: which assets are fresh or stale, and the result of a run.

The component is imported when it is used: it needs Dagster, and `pedigree --help` does not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workflows.recipes.component import PreferenceTuning

__all__ = ["PreferenceTuning"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("workflows.recipes.component"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
