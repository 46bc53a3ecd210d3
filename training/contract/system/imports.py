"""Import large libraries without garbage collection."""

import gc
import importlib
import sys
from types import ModuleType


def import_without_gc(name: str) -> ModuleType:
    """Import a module with the garbage collector off, then exclude all existing objects from later collections.

    torch, transformers and MLflow create hundreds of thousands of permanent objects on import. Python's collector would walk
    them repeatedly: during the import, in every large collection afterwards, and at exit.
    """
    if name in sys.modules:  # nothing to save, and by now many objects may be garbage
        return sys.modules[name]
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
    return module
