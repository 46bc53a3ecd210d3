"""Importing large libraries, with the garbage collector kept out of it."""

import gc
import importlib
import sys
from types import ModuleType


def import_without_gc(name: str) -> ModuleType:
    """Import a module, and have no garbage looked for meanwhile, nor later among what was there by then.

    torch, transformers and MLflow make hundreds of thousands of objects as they are imported, and all of them stay. Python's
    collector walks them again and again while they become more, in every large collection afterwards, and as the process ends.
    """
    if name in sys.modules:  # there is nothing to spare, and much of what is there may be garbage
        return sys.modules[name]
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
    return module
