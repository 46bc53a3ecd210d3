"""Launching jobs: `run_job`, on any `Launcher`.

A `Launcher` starts a job somewhere and gives a `Handle`. All else passes through files in the job's folder: `run_job` follows
`events.jsonl` while the job runs, and finds in `error.json`, or else in the log, why it failed.
"""

import contextlib
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from pydantic import ValidationError

from training.contract.errors import JobFailed, code_of, without_code
from training.contract.protocol.events import Event, Follower
from training.contract.protocol.job import Failure, Job
from training.contract.system.atomic_io import free_bytes, write_error

_POLL_SECONDS = 0.1
_LOG_LINES = 20
_LOG_BYTES = 64 * 1024
# An entry of the report that torchrun ends with: `rank : 1 (local_rank: 1)`, then `exitcode : -9 (pid: 4711)`.
# With several nodes each line begins with the number of its node, and lines of others may come between the two.
_ENDED_BY_SIGNAL = re.compile(
    r"^(\[node \d+\] |)\s*rank\s*: (\d+) .*\n(?=(?:(?!\1).*\n)*\1\s*exitcode\s*: -(\d+) )", re.MULTILINE
)
_FRAME = re.compile(r'^  File (".*", line \d+)', re.MULTILINE)


class Handle(Protocol):
    """A job that was started. `log`: the output of its processes."""

    log: Path

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended the supervisor), or None while it runs."""

    def cancel(self) -> None:
        """End the job and return when none of its processes is left; it may have ended before."""


class Launcher(Protocol):
    def start(self, job: Job, lock: BinaryIO | None = None) -> Handle:
        """Start the job that `job.path` describes. Its processes hold `lock` until the last of them is gone."""


def run_job(launcher: Launcher, job: Job, on_event: Callable[[Event], None], lock: BinaryIO | None = None) -> None:
    """Run `job` to its end, giving each of its events to `on_event` as it comes.

    A job that resumes from checkpoints repeats its earlier events. Raises JobFailed with the root cause and the path of the
    log; on any other exception, KeyboardInterrupt included, the job is cancelled before that is passed on.
    """
    write_job(job)
    follower = Follower(job.events)
    handle = launcher.start(job, lock)
    try:
        status = None
        while status is None:
            status = handle.poll()  # before reading, so that the last events are read after the end
            for event in follower.new():
                on_event(event)
            if status is None:
                time.sleep(_POLL_SECONDS)
    finally:
        handle.cancel()
    if status != 0:
        raise _explain(job, handle.log, status)


def write_job(job: Job) -> None:
    """Write job.json, and remove error and events of an earlier attempt; events stay if it left checkpoints.

    Raises StoreError if the disk refuses it.
    """
    try:
        job.write()
        job.error.unlink(missing_ok=True)
        if not job.checkpoints.exists():
            job.events.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(f"describe the {job.kind} job", job.folder, error) from error


def _explain(job: Job, log: Path, status: int) -> JobFailed:
    """Return the error: the cause with its code, then the job and its log, which has the traceback if there is one."""
    failure = _read_failure(job.error)
    if failure is None:
        text = _tail(log)
        ending = f"the {job.kind} job failed: {_ending(job, text, status)}; its log {log}"
        lines = "\n".join(f"    {line}" for line in text.splitlines()[-_LOG_LINES:])
        return JobFailed(f"{ending} ({free_bytes(job.folder):,} bytes free there) ends with\n{lines}")
    cause = without_code(failure.message)
    if failure.traceback:
        places = _FRAME.findall(failure.traceback)  # none in that of an exception group
        cause = ", in ".join([f"{failure.type}: {cause}", *places[-1:]])
    rank = "" if failure.rank is None or job.nodes * job.processes == 1 else f"{_rank(job, failure.rank)} of "
    message = f"{cause}; {rank}the {job.kind} job failed, whose log is {log}"
    return JobFailed(message, code_of(failure.message))


def _rank(job: Job, rank: int) -> str:
    return f"rank {rank} (node {rank // job.processes})" if job.nodes > 1 else f"rank {rank}"


def _read_failure(path: Path) -> Failure | None:
    """What a rank wrote; None if nothing is there, or only a part since the rank was killed meanwhile."""
    with contextlib.suppress(FileNotFoundError, ValidationError):
        return Failure.model_validate_json(path.read_bytes())
    return None


def _ending(job: Job, log: str, status: int) -> str:
    """How the processes ended.

    torchrun ends the other ranks by SIGTERM, and by SIGKILL those that do not hear it, as in a call of NCCL. Whoever failed
    first is the last in its report, so the last that was ended by any other signal than SIGTERM is most likely the cause.
    """
    ranks = [(int(rank), int(number)) for _, rank, number in _ENDED_BY_SIGNAL.findall(log)]
    if ranks:
        rank, number = min(reversed(ranks), key=lambda entry: entry[1] == signal.SIGTERM)
        return f"{_rank(job, rank)} was ended by {_signal_name(number)}"
    if status < 0:
        return f"its supervisor was ended by {_signal_name(-status)}"
    if status > 128:
        return f"it was ended by {_signal_name(status - 128)}"
    return f"exit status {status}"


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (the kernel does so when memory runs out)" if number == signal.SIGKILL else name


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")
