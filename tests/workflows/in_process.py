"""A home in which jobs and packaging run in this process instead of their own.

A job spends seconds on starting processes, nearly all of them on imports, and a table of eighty edits has a thousand jobs.
So the launcher here calls the function of a job's process, with one rank, and packaging calls the function of its process.
Dagster's records are in memory, MLflow's in a SQLite file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import dagster as dg
import pytest

import model_registry.files
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Services
from model_registry.connection import connect
from model_registry.package_model import package
from model_registry.registry import Registry
from model_registry.tracking import Tracker
from tests.factories import write_inputs
from tests.workflows.homes import write_recipe
from training import main
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.engine import JobState
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe


@dataclass
class EndedJob:
    """A job that has ended."""

    log: Path
    status: int

    def state(self) -> JobState:
        return JobState("ended", status=self.status)

    def stopped(self) -> list[int]:
        return []

    def cancel(self) -> None:
        """There is nothing left to end."""

    def detach(self) -> None:
        """There is nothing left to follow."""


class InProcess:
    """An engine that runs a job at once, from its job.json, as `python -m training.main` does."""

    def find(self, job: Job) -> None:
        return None

    def submit(self, job: Job, lock: BinaryIO | None = None) -> EndedJob:
        job.log.write_text("done in the process that asked for it\n", encoding="utf-8")
        return EndedJob(job.log, main.main(job.path))


def services_in(home: Path) -> Services:
    home.mkdir(parents=True, exist_ok=True)
    database = home / "mlflow" / "mlflow.db"
    if not database.exists():
        database.parent.mkdir(exist_ok=True)
        database.write_bytes(_empty_database())
    address = f"sqlite:///{database}"
    return Services(
        home=home,
        store=Store(home / "store"),
        engine=InProcess(),
        tracker=Tracker(address, home / "mlflow" / "artifacts"),
        registry=Registry(address, home / "mlflow" / "downloads"),
    )


@cache
def _empty_database() -> bytes:
    """Return an MLflow database with all its tables: creating them takes seconds."""
    with TemporaryDirectory() as folder:
        connect(f"sqlite:///{folder}/mlflow.db")
        return (Path(folder) / "mlflow.db").read_bytes()


@dataclass
class Baseline:
    """A home in which each recipe was run once, and the results. Every test starts from it."""

    home: Path
    services: Services
    instance: dg.DagsterInstance
    folders: dict[str, Path]
    fingerprints: dict[str, dict[str, str | None]] = field(default_factory=dict)
    records: dict[str, list[dg.AssetMaterialization]] = field(default_factory=dict)

    def run_once(self, name: str) -> None:
        loaded = load_recipe(self.folders[name])
        report = materialize(loaded, self.services, self.instance)
        assert report.succeeded and len(report.assets) == len(GRAPH), report
        self.fingerprints[name] = {asset.asset: asset.fingerprint for asset in report.assets}
        self.keep_records(name)

    def keep_records(self, name: str) -> None:
        """Keep the latest materializations of the recipe for `restore`."""
        pipeline = load_recipe(self.folders[name]).pipeline
        for asset in GRAPH:
            event = self.instance.get_latest_materialization_event(pipeline.key(asset))
            assert event is not None and event.asset_materialization is not None
            self.records.setdefault(name, []).append(event.asset_materialization)

    def restore(self, name: str) -> None:
        """Report the recipe's first materializations to Dagster again, so that they are the latest."""
        for record in self.records[name]:
            self.instance.report_runless_asset_event(record)


@contextmanager
def run_in(
    place: Path,
    recipes: dict[str, dict[str, Any]],
    write: Callable[[Path], None] = write_inputs,
) -> Iterator[Baseline]:
    """Yield a home below `place` in which these recipes were run once, with packaging in this process.

    `write` writes the inputs of a recipe.
    """
    home = place / "home"
    folders = {name: write_recipe(place / "recipes" / name, recipe) for name, recipe in recipes.items()}
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setattr(model_registry.files, "_package", package)
        baseline = Baseline(home, services_in(home), instance, folders)
        for name, folder in folders.items():
            write(folder)
            baseline.run_once(name)
        yield baseline
