"""Why the databases of a home refuse, or are gone. The errors of SQLite name neither the file nor the disk."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from model_registry.connection import CORRUPT_REMEDY
from training.contract.errors import StoreError
from training.contract.system.atomic_io import (
    READ_ONLY_HINT,
    SHARED_HOME_HINT,
    free_bytes,
    is_disk_full,
    is_read_only,
    write_error,
)
from workflows.orchestration.resources import pedigree_home

# SQLite needs a few pages for its journal. With less it reports "disk I/O error".
_FULL_BYTES = 1 << 18
_IN_USE = "in use"
_GONE = re.compile("No such file or directory|unable to open database file|no such table|refuses: runs$")


def explain(message: str) -> StoreError | None:
    """Return the error for a database's `message`: the file at fault and the remedy. None if all databases are in order."""
    databases = list(_files("*.db"))
    for folder in sorted({path.parent for path in databases} | {pedigree_home()}):
        if is_read_only(folder):
            return StoreError(f"{message}: {folder} is on a read-only file system; {READ_ONLY_HINT}", "read-only")
        if is_disk_full(message) or free_bytes(folder) < _FULL_BYTES:
            return write_error("write a database", folder, f"{message} (No space left on device)")
    if (removed := explain_removed_home(message)) is not None:
        return removed
    for path in _files("*.db*"):
        if not os.access(path, os.W_OK):
            return StoreError(f"{message}: this user may not write {path}; {SHARED_HOME_HINT}", "not-permitted")
    for path in databases:
        result = _check(path)
        if result == _IN_USE:
            return StoreError(
                f"{message}; {path} is in use by another process: end it, or wait, and run the same command again",
                "database-locked",
            )
        if result != "ok":
            return StoreError(f"{message}; {path} is corrupt ({result}): {_remedy(path)}", "database-corrupt")
    return None


def explain_removed_home(message: str) -> StoreError | None:
    """Return the error for `message` if the home was removed while this command ran. Parts of it may be there again."""
    if _records().is_dir() or not _GONE.search(message):
        return None
    return StoreError(f"{message}: {pedigree_home()} was removed while this command ran; run again", "home-removed")


def _check(path: Path) -> str:
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as database:
            [result] = database.execute("PRAGMA quick_check(1)").fetchone()
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        return _IN_USE if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else str(error)
    return str(result)


def _remedy(path: Path) -> str:
    if path.parent.name == "mlflow":
        return CORRUPT_REMEDY
    return (
        "move it away and run the same command. Dagster then shows no earlier runs, and all results are found again in the "
        "store"
    )


def _files(pattern: str) -> Iterator[Path]:
    for folder in (pedigree_home() / "mlflow", _records()):
        yield from sorted(folder.rglob(pattern))


def _records() -> Path:
    """Return the folder of Dagster's databases."""
    return Path(os.environ.get("DAGSTER_HOME") or pedigree_home() / "dagster")
