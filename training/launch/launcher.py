"""Running a job to its end with any engine.

`run_job` follows `events.jsonl` in the job's folder, and reads the cause of a failure from `error.json`, or else from the log.
"""

import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from training.contract.errors import JobFailed, code_of, without_code
from training.contract.protocol.events import Event, Follower, make_event
from training.contract.protocol.input_files import rewritten_inputs
from training.contract.protocol.job import Failure, Job
from training.contract.system.atomic_io import free_bytes, write_error
from training.launch.engine import Engine, Handle, JobState, Submission, has_other_work
from training.launch.stall import StallDetector

_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_STARTS = 600.0
_LOG_LINES = 20
_SHOWN = 3
_LOG_BYTES = 64 * 1024
# An entry of torchrun's final report: `rank : 1 (local_rank: 1)`, then `exitcode : -9 (pid: 4711)`.
# With several nodes each line begins with its node's number, and lines of other nodes may come between the two.
_ENDED = re.compile(
    r"^(\[node \d+\] |)\s*rank\s*: (\d+) .*\n(?=(?:(?!\1).*\n)*\1\s*exitcode\s*: (-?\d+) )", re.MULTILINE
)
# How the runtimes of C++ and Rust say so before they abort the process.
_NO_MEMORY = re.compile(r"std::bad_alloc|memory allocation of \d+ bytes failed")
# How the kernel ends a process that reads a memory-mapped file beyond its end, because the file was truncated.
_TRUNCATED = signal.SIGBUS.name
# faulthandler's list of modules is long and says nothing about the cause.
_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)
_FRAME = re.compile(r'^  File (".*", line \d+)', re.MULTILINE)


def run_job(
    engine: Engine,
    job: Job,
    on_event: Callable[[Event], None],
    lock: BinaryIO | None = None,
    is_canceled: Callable[[], bool] = lambda: True,
) -> None:
    """Run `job` to its end, and pass each event to `on_event` immediately. Follow a live job of the same work, if any.
    A live job with other settings, such as the number of nodes, is canceled first.

    A job that resumes from checkpoints repeats its earlier events. Notes tell of the queue and of a long stall. Raise JobFailed
    with the root cause and the path of the log, and also if the job's folder is removed, as no result could be found again.

    On any other exception, re-raise, and detach from the job. If an interrupt such as KeyboardInterrupt ends the run, and
    `is_canceled` returns True, cancel the job instead.
    """
    handle: Handle | None = None
    try:
        if (handle := engine.find(job)) is not None and has_other_work(job):
            handle.cancel()
            handle = None
        if handle is None:
            write_job(job)
            handle = engine.submit(job, lock)
        status = _follow(handle, job, on_event)
    except BaseException as error:
        if isinstance(error, JobFailed) or (not isinstance(error, Exception) and is_canceled()):
            _cancel(engine, job, handle)
        elif handle is not None:
            handle.detach()
        raise
    handle.cancel()
    Submission.forget(job)
    if status != 0:
        _check_exists(job)
        raise _explain(job, handle.log, status)


def _cancel(engine: Engine, job: Job, handle: Handle | None) -> None:
    """Cancel the job. An interrupt may have come just after the engine accepted it."""
    if (handle := handle or engine.find(job)) is not None:
        handle.cancel()
    Submission.forget(job)


def _follow(handle: Handle, job: Job, on_event: Callable[[Event], None]) -> int:
    """Return the job's exit status when it has ended."""
    follower, stall, queue = Follower(job.events), StallDetector(), QueueNotes()
    while True:
        state = handle.state()  # first, so that the last events are read after the end
        for event in follower.new():
            stall.on_event(event)
            on_event(event)
        if (note := queue.note(state)) is not None:
            on_event(note)
        if state.status is not None:
            return state.status
        if state.phase != "running":
            stall = StallDetector()
        if (note := stall.note(job.kind, handle.stopped)) is not None:
            on_event(note)
        _check_exists(job)
        time.sleep(_POLL_SECONDS)


class QueueNotes:
    """Tells of each new state of a job. An estimated start that moves is told every ten minutes at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._reported, self._when = clock, JobState("running"), 0.0

    def note(self, state: JobState) -> Event | None:
        """Return a note to the user; None if there is nothing new.

        `queue`: the phase of the job; `is_stuck`: whether it cannot start without help.
        """
        if state.text == self._reported.text:
            return None
        has_only_moved = replace(state, start="") == replace(self._reported, start="")
        if has_only_moved and self._clock() - self._when < _SECONDS_BETWEEN_STARTS:
            return None
        self._reported, self._when = state, self._clock()
        return make_event("note", text=state.text, queue=state.phase, is_stuck=bool(state.remedy))


def write_job(job: Job) -> None:
    """Write job.json, and remove the error and events of an earlier attempt. Keep events if it left checkpoints.

    Raise StoreError if a write fails.
    """
    try:
        job.write()
        job.error.unlink(missing_ok=True)
        if not job.checkpoints.exists():
            job.events.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(f"describe the {job.kind} job", job.folder, error) from error


def _check_exists(job: Job) -> None:
    if not job.path.exists():
        raise JobFailed(
            f"{job.folder} was removed while the {job.kind} job ran, so the job was ended; its checkpoints are lost. Run again",
            "job-folder-removed",
        )


def _explain(job: Job, log: Path, status: int) -> JobFailed:
    """Return the error: the cause with its code, the job, and its log with the traceback, if any."""
    failure = _read_failure(job.error)
    if failure is None:
        text = _read_tail(log)
        ending = f"the {job.kind} job failed: {_describe_ending(job, text, status)}"
        lacks_memory = _NO_MEMORY.search(text) is not None
        if lacks_memory:
            ending += " because it ran out of memory: run it on a machine with more, or with a higher limit"
        changed = ", ".join(map(str, rewritten_inputs(job)[:_SHOWN])) if _TRUNCATED in ending else ""
        if changed:
            ending += f" because {changed} changed while it was read: run again once it is written"
        lines = "\n".join(f"    {line}" for line in text.splitlines()[-_LOG_LINES:])
        end = f"ends with\n{lines}" if lines else "is empty"
        message = f"{ending}; its log {log} ({free_bytes(job.folder):,} bytes free there) {end}"
        return JobFailed(message, "out-of-memory" if lacks_memory else "file-changed" if changed else None)
    cause = without_code(failure.message)
    if failure.traceback:
        frames = _FRAME.findall(failure.traceback)  # empty for an exception group
        cause = ", in ".join([f"{failure.type}: {cause}", *frames[-1:]])
    rank = "" if failure.rank is None or job.nodes * job.processes == 1 else f"{_rank(job, failure.rank)} of "
    message = f"{cause}; {rank}the {job.kind} job failed; its log is {log}"
    return JobFailed(message, code_of(failure.message))


def _rank(job: Job, rank: int) -> str:
    return f"rank {rank} (node {rank // job.processes})" if job.nodes > 1 else f"rank {rank}"


def _read_failure(path: Path) -> Failure | None:
    """Return the failure that a rank wrote; None if the file is missing, or incomplete because the rank was killed."""
    with contextlib.suppress(FileNotFoundError, ValidationError):
        return Failure.model_validate_json(path.read_bytes())
    return None


def _describe_ending(job: Job, log: str, status: int) -> str:
    """Return how the processes ended.

    torchrun ends the other ranks by SIGTERM, then by SIGKILL if they do not react, as in a call of NCCL. Its report lists the
    first failed rank last. So the last rank that ended otherwise than by SIGTERM is most likely the cause.
    """
    ranks = [(int(rank), int(code)) for _, rank, code in _ENDED.findall(log)]
    if ranks:
        rank, code = min(reversed(ranks), key=lambda entry: entry[1] == -signal.SIGTERM)
        ending = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        return f"{_rank(job, rank)} {ending}"
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


def _read_tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return _MODULES.sub("", file.read().decode(errors="replace"))
