"""Import large libraries without garbage collection, and some of their names only at their first use."""

import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def import_without_gc(name: str) -> ModuleType:
    """Import a module with the garbage collector off, then exclude all existing objects from later collections.

    torch, transformers and MLflow create hundreds of thousands of permanent objects on import. Python's collector would walk
    them repeatedly: during the import, in every large collection afterwards, and at exit.
    """
    if name in sys.modules:  # nothing to save, and by now many objects may be garbage
        return importlib.import_module(name)  # waits for another thread that is importing it
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
    return module


def lazy_names(module: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `module`. It imports `names`, by their module, at their first use.

    Such a module stands for a large library that few processes need. Import it whole and write `mlflow_api.MlflowClient`:
    importing a name from it would import the library.
    """
    modules = {name: origin for origin, group in names.items() for name in group}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_without_gc(modules[name]), name)

    return find
