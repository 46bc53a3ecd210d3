"""Jobs that wait or run in the queue of an engine, perhaps without a run that follows them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from training.contract.errors import EngineError, without_code
from training.contract.protocol.job import Job
from training.launch.engine import RECORD, Engine, JobState, Submission


def submitted_jobs(home: Path) -> Iterator[Job]:
    """Yield the jobs whose end no run has seen. Skip those that another version of Pedigree wrote."""
    for record in sorted((home / "jobs").glob(f"*/{RECORD}")):
        if (job := submitted_job(record.parent)) is not None:
            yield job


def submitted_job(folder: Path) -> Job | None:
    """Return the submitted job of a folder; None without one, or if another version of Pedigree wrote it."""
    with contextlib.suppress(OSError, ValidationError):
        if (folder / RECORD).exists():
            return Job.read(folder / "job.json")
    return None


def live_state(engine: Engine, job: Job) -> JobState | None:
    """Return the state of a submitted job; None if it has ended. The phase is `unknown` if its engine does not answer."""
    if Submission.read(job) is None:
        return None
    try:
        handle = engine.find(job)
    except EngineError as error:
        return JobState("unknown", f"it is not known if its job has ended: {without_code(str(error))}")
    state = None if handle is None else handle.state()
    return None if state is None or state.phase == "ended" else state
