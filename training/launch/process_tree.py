"""Ending all descendant processes on Linux, with adopted orphans and the process tree of /proc.

Process groups do not suffice: torchrun starts each rank in its own session, so a signal to the group misses the ranks. We end
only descendants of the calling process, never processes by name.
"""

import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

from training.contract.system.process import prctl

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


def adopt_orphans() -> None:
    """Become the parent of each descendant after its parent dies."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ancestors() -> list[int]:
    """Return the process ids above this process, nearest first."""
    parents, pids = _parents(), [os.getppid()]
    while pids[-1] in parents:
        pids.append(parents[pids[-1]])
    return pids


def descendants(root: int | None = None) -> list[int]:
    """Return the process ids below `root` (this process by default), in any session, including zombies."""
    children = defaultdict(list)
    for pid, parent in _parents().items():
        children[parent].append(pid)
    pids = [os.getpid() if root is None else root]
    for pid in pids:
        pids.extend(children[pid])
    return pids[1:]


def living_siblings() -> int:
    """Return the number of processes with the same parent as this one, which counts too. Zombies do not count."""
    return sum(parent == os.getppid() and state != "Z" for state, parent in _states().values())


def stopped_descendants(root: int) -> list[int]:
    """Return the processes below `root` that SIGSTOP, or a debugger, has stopped."""
    states = _states()
    return [pid for pid in descendants(root) if pid in states and states[pid][0] in "Tt"]


def end_descendants(grace: float) -> None:
    """End all descendants and wait for them: SIGTERM first, SIGKILL after `grace` seconds.

    A process that had children, such as torchrun, is killed as soon as its last child ends. After `adopt_orphans` no process
    escapes: an orphan becomes a child of this process.
    """
    deadline = time.monotonic() + grace
    signalled = descendants()
    had_children = set(signalled) & set(_parents().values())
    _signal(signalled, signal.SIGTERM)
    while _reap() and (remaining := descendants()):
        late = time.monotonic() > deadline
        have_children = set(_parents().values())
        _signal([pid for pid in remaining if late or (pid in had_children - have_children)], signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> bool:
    """Reap dead children, and return whether a child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _parents() -> dict[int, int]:
    return {pid: parent for pid, (_, parent) in _states().items()}


def _states() -> dict[int, tuple[str, int]]:
    """Return the state and the parent of each process."""
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # `pid (name) state parent ...`; the name may contain spaces and parentheses
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            states[int(stat.parent.name)] = state, int(parent)
    return states
