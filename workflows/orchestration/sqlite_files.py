"""The SQLite databases of a home: which of them is corrupt, locked or another user's. SQLite's errors do not name the file."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from model_registry.connection import CORRUPT_REMEDY
from workflows.orchestration.resources import pedigree_home


def find_foreign() -> Path | None:
    """Return a database or journal that this user cannot write."""
    return next((path for path in _files("*.db*") if not os.access(path, os.W_OK)), None)


def advice() -> str | None:
    """Return the file at fault and the remedy; None if all databases can be read and written."""
    for path in _files("*.db"):
        try:
            with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as database:
                [result] = database.execute("PRAGMA quick_check(1)").fetchone()
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            result = str(error)
        if "locked" in result:
            return f"{path} is in use by another process: end it, or wait, and run the same command again"
        if result != "ok":
            return f"{path} is corrupt ({result}): {_remedy(path)}"
    return None


def _remedy(path: Path) -> str:
    if path.parent.name == "mlflow":
        return CORRUPT_REMEDY
    return (
        "move it away and run the same command. Dagster then shows no earlier runs, and all results are found again in the "
        "store"
    )


def _files(pattern: str) -> Iterator[Path]:
    home = pedigree_home()
    for folder in (home / "mlflow", Path(os.environ.get("DAGSTER_HOME") or home / "dagster")):
        yield from sorted(folder.rglob(pattern))
