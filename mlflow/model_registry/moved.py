"""A home that was moved, renamed, or restored from a backup at another place.

MLflow writes the absolute address of artifacts into its database: of each experiment, each run, each model version. After
a move they lead nowhere; after a copy to the original, into which the copy's runs would then write. So they follow the home.
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


def follow_move(database: Path, root: Path) -> None:
    """Make the addresses of every experiment in the SQLite file `database` that lay in another home lead below `root`.

    All of them or none. A database that cannot be read is left to MLflow, which says why.
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
    """Where an experiment's artifacts lie now whose address `old` is in another home; None where they are at `old`.

    They are there if that is another way to the same home, or if they are found there and not here: somebody keeps them
    elsewhere. Where there are none yet, nothing is lost.
    """
    head, in_home, name = old.rpartition(f"{_PLACE}/")
    former, there = local_path(head), local_path(old)
    if not in_home or former is None or there is None:
        return None
    if _is_seen(former) and former.samefile(root.parents[1]):
        return None
    return f"{root.as_uri()}/{name}" if _is_seen(root / unquote(name)) or not _is_seen(there) else None


def _is_seen(place: Path) -> bool:
    """Not so in a folder of another user that may not be looked into, where Path.exists raises."""
    with contextlib.suppress(PermissionError):
        return place.exists()
    return False
