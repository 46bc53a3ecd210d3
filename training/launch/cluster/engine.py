"""What an engine with a queue, such as Slurm, tells about a job, and the record of a submitted job in its folder.

`engine.json` is written before the submission, and again with the id after it. If the process ends in between, nobody knows the
id. So an engine finds a job by its name. The name is a function of artifact, key and store.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.contract.config.fields import StrictModel
from training.contract.protocol.job import Job
from training.contract.system.atomic_io import write_durably

Phase = Literal["queued", "running", "ended", "unknown"]
_NAME_DIGITS = 16


@dataclass(frozen=True)
class JobState:
    """The state of a submitted job. `detail`: for the user, when it changes. `status`: the exit status of an ended job.

    `remedy`: what a user must do, if the job cannot start without help; else empty.
    """

    phase: Phase
    detail: str
    remedy: str = ""
    status: int | None = None


class Submission(StrictModel):
    """The content of `engine.json`.

    `id`: empty before the submission; `submitted`: seconds since the epoch; `work_sha256`: of all that the job does.
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

    @classmethod
    def read(cls, job: Job) -> "Submission | None":
        """Return the record of the job; None if it was not submitted, or the record is damaged."""
        try:
            return cls.model_validate_json(record_of(job).read_bytes())
        except (FileNotFoundError, ValueError):
            return None


def record_of(job: Job) -> Path:
    return job.folder / "engine.json"


def digest_of(job: Job) -> str:
    """Return the sha256 of the job.json in the job's folder."""
    return hashlib.sha256(job.path.read_bytes()).hexdigest()


def work_of(job: Job) -> str:
    """Return the sha256 of all that the job does. Stamps of files only tell if a file changed meanwhile."""
    return hashlib.sha256(job.model_dump_json(exclude={"stamps"}).encode()).hexdigest()


def name_of(job: Job) -> str:
    """Return the job's name in a queue: equal for equal work in one store, and different for another store."""
    digest = hashlib.sha256(f"{job.store}\n{job.derivation.key}".encode()).hexdigest()
    return f"{job.artifact}-{digest[:_NAME_DIGITS]}"
