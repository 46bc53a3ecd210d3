"""Homes in which recipes were run once. All test processes of a session share them; each test works in a copy of its own.

A prepared home is a folder:

    home/           the home, with MLflow's database and artifacts
    recipes/        the folders of the recipes
    events.db       Dagster's events, and `runs.db` its runs: the tables of an instance in memory
    prepared.json   the fingerprints of each recipe's artifacts; written last
"""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from filelock import FileLock

import model_registry.files
from model_registry.client.relocate import relocate_artifacts
from model_registry.package_model import package
from tests.factories import write_inputs
from tests.workflows.in_process import Baseline, run_in, services_in
from training.contract.identity.fingerprint import fingerprint, short


@dataclass(frozen=True)
class PreparedHomes:
    """The prepared homes of a session, below a folder that all its test processes share."""

    folder: Path

    @contextmanager
    def copied_to(
        self, place: Path, recipes: dict[str, dict[str, Any]], write: Callable[[Path], None] = write_inputs
    ) -> Iterator[Baseline]:
        """Yield a home in `place` in which these recipes were run once. Packaging is in this process meanwhile.

        `write` writes the inputs of a recipe.
        """
        prepared = self.prepare(recipes, write)
        subprocess.run(["cp", "--archive", f"{prepared}/.", place], check=True)  # shutil would split hard links
        home = place / "home"
        for note in home.glob("names/*.json"):  # the folder that a recipe's name belongs to
            note.write_text(note.read_text().replace(str(prepared), str(place)))
        relocate_artifacts(home / "mlflow" / "mlflow.db", home / "mlflow" / "artifacts")
        with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
            patch.setattr(model_registry.files, "_package", package)
            for name, tables in _tables(instance).items():
                with closing(sqlite3.connect(place / f"{name}.db")) as saved:
                    _replace_text(saved, str(prepared), str(place))
                    saved.backup(tables)
            fingerprints = json.loads((place / "prepared.json").read_text())
            folders = {name: place / "recipes" / name for name in recipes}
            baseline = Baseline(home, services_in(home), instance, folders, fingerprints)
            for name in recipes:
                baseline.keep_records(name)
            yield baseline

    def prepare(self, recipes: dict[str, dict[str, Any]], write: Callable[[Path], None] = write_inputs) -> Path:
        """Return the folder of the prepared home. The first test process that asks for it runs the recipes."""
        key = fingerprint("prepared home", {"recipes": recipes, "write": f"{write.__module__}.{write.__qualname__}"})
        place = self.folder / short(key)
        with FileLock(f"{place}.lock"):
            if not (place / "prepared.json").exists():
                shutil.rmtree(place, ignore_errors=True)  # of a process that failed
                place.mkdir(parents=True)
                with run_in(place, recipes, write) as made:
                    for name, tables in _tables(made.instance).items():
                        with closing(sqlite3.connect(place / f"{name}.db")) as saved:
                            tables.backup(saved)
                (place / "prepared.json").write_text(json.dumps(made.fingerprints))
        return place


def _tables(instance: dg.DagsterInstance) -> dict[str, sqlite3.Connection]:
    """Return the connections to the tables of an instance in memory."""
    storages: dict[str, Any] = {"events": instance.event_log_storage, "runs": instance.run_storage}
    return {name: storage._held_conn.connection.driver_connection for name, storage in storages.items()}


def _replace_text(database: sqlite3.Connection, old: str, new: str) -> None:
    """Replace a text in all columns of all tables."""
    with database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
                if kind.startswith(("TEXT", "VARCHAR")):
                    database.execute(
                        f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?)",
                        (old, new, old),
                    )
