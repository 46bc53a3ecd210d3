"""Artifact addresses after a home was moved, renamed, or restored from a backup elsewhere.

MLflow stores the absolute artifact address of each experiment, run and model version in its database. After a move these are
invalid; after a copy they point to the original, and runs of the copy would write there. So we rewrite them.
"""

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import unquote

from model_registry.files import local_path

_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_ARTIFACTS = "/mlflow/artifacts"


def relocate_artifacts(database: Path, root: Path) -> None:
    """Rewrite addresses in the SQLite file `database` from another home, so they lead below `root`.

    One transaction. Ignore an unreadable database: MLflow reports it.
    """
    if not database.is_file():
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for (old,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            if (new := _new_address(old or "", root)) is None:
                continue
            for table, column in _ADDRESSES:
                if table not in tables:  # of an earlier version of MLflow, which adds it later
                    continue
                # Not LIKE: an address has a % for each space of its path.
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
                    (new, len(old) + 1, len(old) + 1, f"{old}/"),
                )


def _new_address(old: str, root: Path) -> str | None:
    """Return the new address of an experiment's artifacts if `old` is in another home; None if `old` stays.

    It stays if it is another path to this home, or if only `old` has artifacts: then it is in use there.
    """
    head, in_home, name = old.rpartition(f"{_ARTIFACTS}/")
    old_home, old_folder = local_path(head), local_path(old)
    if not in_home or old_home is None or old_folder is None:
        return None
    if _is_visible(old_home) and old_home.samefile(root.parents[1]):
        return None
    return f"{root.as_uri()}/{name}" if _is_visible(root / unquote(name)) or not _is_visible(old_folder) else None


def _is_visible(path: Path) -> bool:
    """Return whether the path exists; False if its folder may not be read, in which case Path.exists raises."""
    with contextlib.suppress(PermissionError):
        return path.exists()
    return False
