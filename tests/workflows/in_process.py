"""A home in which everything happens in this process: our own code behind our own seams, but for the start of processes.

A job takes six seconds when it starts its processes, nearly all of them imports. A table of eighty edits has a thousand
jobs. So the launcher here calls what a job's process calls, in a world of one, and a model version is packaged by a call of
what its process calls. Dagster's records are in memory, MLflow's in a SQLite file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from assets.pipeline import Services
from model_registry.registry import Registry
from model_registry.tracking import Tracker
from training import main
from training.contract.job import Job
from training.contract.store import Store


@dataclass(frozen=True)
class Ended:
    """A job that was over before anybody asked."""

    log: Path
    status: int

    def poll(self) -> int | None:
        return self.status

    def cancel(self) -> None:
        """There is nothing left to end."""


class InProcess:
    """Does a job at once, from its job.json, as `python -m training.main` does."""

    def start(self, job: Job, lock: BinaryIO | None = None) -> Ended:
        job.log.write_text("done in the process that asked for it\n", encoding="utf-8")
        return Ended(job.log, main.main(job.path))


def services_in(home: Path) -> Services:
    address = f"sqlite:///{home / 'mlflow.db'}"
    return Services(
        home=home,
        store=Store(home / "store"),
        launcher=InProcess(),
        tracker=Tracker(address, home / "artifacts"),
        registry=Registry(address, home / "downloads"),
    )
