"""A home that was moved, renamed, or restored from a backup at another place.

MLflow writes the absolute addresses of artifacts into its database: of each experiment, run and model version. After a move
they lead nowhere; after a copy, to the original, into which the copy's runs would then write. So they follow the home.
"""

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import unquote

from model_registry.files import local_path

_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_PLACE = "/mlflow/artifacts"


def relocate_artifacts(database: Path, root: Path) -> None:
    """Rewrite the addresses in the SQLite file `database` that point into another home, so that they lead below `root`.

    One transaction. A database that cannot be read is left to MLflow, which says why.
    """
    if not database.is_file():
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for (old,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            if (new := _moved(old or "", root)) is None:
                continue
            for table, column in _ADDRESSES:
                # Not LIKE: an address has % in it where its path has a space.
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?",
                    (new, len(old) + 1, len(old) + 1, f"{old}/"),
                )


def _moved(old: str, root: Path) -> str | None:
    """The new address of an experiment's artifacts if `old` is their address in another home; None if `old` stays.

    It stays if it is another path to this home, or if there are artifacts at `old` and none here: somebody keeps them
    there.
    """
    head, in_home, name = old.rpartition(f"{_PLACE}/")
    former, there = local_path(head), local_path(old)
    if not in_home or former is None or there is None:
        return None
    if _is_seen(former) and former.samefile(root.parents[1]):
        return None
    return f"{root.as_uri()}/{name}" if _is_seen(root / unquote(name)) or not _is_seen(there) else None


def _is_seen(place: Path) -> bool:
    """False too where the folder is another user's and may not be read: Path.exists raises there."""
    with contextlib.suppress(PermissionError):
        return place.exists()
    return False
