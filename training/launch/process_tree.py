"""Ending all descendant processes on Linux, adopted orphans too. psutil reads the tree of processes.

Process groups do not suffice: torchrun starts each rank in its own session, so a signal to the group misses the ranks. We end
only descendants of the calling process, never processes by name. psutil compares start times before it sends a signal, so no
process with a reused id gets one.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

from training.contract.system.process import prctl

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def adopt_orphans() -> None:
    """Become the parent of each descendant after its parent dies."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ancestors() -> list[int]:
    """Return the process ids above this process, nearest first."""
    return [process.pid for process in psutil.Process().parents()]


def living_siblings() -> int:
    """Return the number of processes with the same parent as this one, which counts too. Zombies do not count."""
    return sum(
        _status(sibling) not in (None, psutil.STATUS_ZOMBIE) for sibling in _below(os.getppid(), recursive=False)
    )


def stopped_descendants(root: int) -> list[int]:
    """Return the processes below `root` that SIGSTOP, or a debugger, has stopped."""
    return [process.pid for process in _below(root) if _status(process) in _STOPPED]


def end_descendants(grace: float) -> None:
    """End all descendants and wait for them: SIGTERM first, SIGKILL after `grace` seconds.

    A process that had children, such as torchrun, is killed as soon as its last child ends. After `adopt_orphans` no process
    escapes: an orphan becomes a child of this process.
    """
    deadline = time.monotonic() + grace
    descendants = _below(os.getpid())
    had_children = _parents(descendants)
    _signal(descendants, signal.SIGTERM)
    while _reap():
        descendants = _below(os.getpid())
        late, have_children = time.monotonic() > deadline, _parents(descendants)
        _signal((p for p in descendants if late or p.pid in had_children - have_children), signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _below(root: int, recursive: bool = True) -> list[psutil.Process]:
    """Return the processes below `root`, in any session, including zombies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(root).children(recursive=recursive)
    return []


def _parents(processes: Iterable[psutil.Process]) -> set[int]:
    parents = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parents.add(process.ppid())
    return parents


def _status(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status()
    return None


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _reap() -> bool:
    """Reap dead children, and return whether a child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
