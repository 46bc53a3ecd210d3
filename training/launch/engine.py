"""The seam between a run and what executes its jobs: this machine, Slurm or Ray.

An `Engine` submits a job, or finds one that was submitted before, and returns a `Handle`. Everything else is in files of the
job's folder. An engine with a queue keeps a record there, `engine.json`: before the submission, and with the id after it. If
the process ends in between, nobody knows the id. So an engine finds a job by its name, a function of artifact, key and store.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from training.contract.config.fields import StrictModel
from training.contract.protocol.job import Job
from training.contract.system.atomic_io import write_durably

Phase = Literal["queued", "running", "ended", "unknown"]
_NAME_DIGITS = 16
RECORD = "engine.json"


@dataclass(frozen=True)
class JobState:
    """The state of a job. `detail`: for the user, when it changes. `start`: the estimated start of a waiting job.

    `remedy`: what a user must do, if the job cannot start without help. `status`: the exit status of an ended job; negative:
    the signal that ended its supervisor.
    """

    phase: Phase
    detail: str = ""
    start: str = ""
    remedy: str = ""
    status: int | None = None

    @property
    def text(self) -> str:
        start = f", to start about {self.start}" if self.start else ""
        return f"{self.detail}{start}" + (f"; it cannot start without help: {self.remedy}" if self.remedy else "")


class Handle(Protocol):
    """A submitted job. `log`: the output of its processes."""

    log: Path

    def state(self) -> JobState:
        """Return the state of the job. The engine is not asked more often than it likes."""

    def stopped(self) -> Sequence[int]:
        """Return the ids of the job's processes that a signal has stopped, as SIGSTOP does. Empty if they are elsewhere."""

    def cancel(self) -> None:
        """End the job's processes and wait for them. The job may have ended before."""

    def detach(self) -> None:
        """Stop following the job, which goes on. A job on this machine cannot, and is canceled."""


class Engine(Protocol):
    """Runs jobs."""

    def find(self, job: Job) -> Handle | None:
        """Return a live job with the same key, submitted before; None without one. Nothing is changed."""

    def submit(self, job: Job, lock: BinaryIO | None = None) -> Handle:
        """Submit the job of `job.path`. Processes on this machine hold `lock` until the last one ends."""


class Submission(StrictModel):
    """The content of `engine.json`.

    `id`: empty before the submission; `submitted`: seconds since the epoch; `work_sha256`: `work_of` the job.
    """

    engine: str
    id: str
    submitted: float
    work_sha256: str

    @classmethod
    def of(cls, engine: str, id: str, job: Job) -> "Submission":
        return cls(engine=engine, id=id, submitted=time.time(), work_sha256=work_of(job))

    def write(self, job: Job) -> None:
        write_durably(record_of(job), self.model_dump_json(indent=2).encode())

    @staticmethod
    def forget(job: Job) -> None:
        """Remove the record: the job has ended."""
        record_of(job).unlink(missing_ok=True)

    @classmethod
    def read(cls, job: Job) -> "Submission | None":
        """Return the record of the job; None if it was not submitted, or the record is damaged."""
        try:
            return cls.model_validate_json(record_of(job).read_bytes())
        except (FileNotFoundError, ValueError):
            return None


def record_of(job: Job) -> Path:
    return job.folder / RECORD


def digest_of(job: Job) -> str:
    """Return the sha256 of the job.json in the job's folder."""
    return hashlib.sha256(job.path.read_bytes()).hexdigest()


def work_of(job: Job) -> str:
    """Return the sha256 of what the job makes and how it runs. Paths may differ, and so may other parts of the recipe."""
    content = f"{job.kind}\n{job.derivation.key}\n{job.compute.model_dump_json()}"
    return hashlib.sha256(content.encode()).hexdigest()


def has_other_work(job: Job) -> bool:
    """Return whether the submitted job of this folder does something else. One without a record counts as the same."""
    record = Submission.read(job)
    return record is not None and record.work_sha256 != work_of(job)


def name_of(job: Job) -> str:
    """Return the job's name in a queue: equal for equal work in one store, and different for another store."""
    digest = hashlib.sha256(f"{job.store.resolve()}\n{job.derivation.key}".encode()).hexdigest()
    return f"{job.artifact}-{digest[:_NAME_DIGITS]}"
