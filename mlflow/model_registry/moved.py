"""A home that was moved, renamed, or restored from a backup at another place.

MLflow writes the absolute address of artifacts into its database: of each experiment, each run, each model version. After
a move they lead nowhere; after a copy to the original, into which the copy's runs would then write. So they follow the home.
"""

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote

from model_registry.files import local_path

_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_PLACE = "/mlflow/artifacts"


def follow_move(database: Path, root: Path) -> None:
    """Make every address in the SQLite file `database` that led below another home lead below `root`.

    A database that cannot be read is left to MLflow, which says why.
    """
    if not database.is_file():
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for old in _former_roots(connection, root):
            for table, column in _ADDRESSES:
                # Not LIKE: an address has % in it where its path has a space.
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                    (root.as_uri(), len(old) + 1, len(old) + 1, f"{old}/"),
                )


def _former_roots(connection: sqlite3.Connection, root: Path) -> set[str]:
    """Where experiments lie that were begun when the home had another name; not another way to the same folder."""
    experiments = connection.execute("SELECT name, artifact_location FROM experiments").fetchall()
    roots = {where.removesuffix(f"/{quote(name)}") for name, where in experiments if where}
    return {
        old for old in roots if old.endswith(_PLACE) and old != root.as_uri() and not _is_same(local_path(old), root)
    }


def _is_same(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()
