"""Leaving no process behind, on Linux: adopted orphans, and the process tree in /proc.

Process groups do not suffice: torchrun gives every rank a session of its own, so a signal to the group misses the ranks.
Only descendants of the calling process are ever ended, never processes of some name.
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
    """Become the parent of every descendant whose own parent dies."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ancestors() -> list[int]:
    """The process ids above this process, nearest first."""
    parents, found = _parents(), [os.getppid()]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


def descendants() -> list[int]:
    """The process ids below this process, in any session, zombies included."""
    children = defaultdict(list)
    for pid, parent in _parents().items():
        children[parent].append(pid)
    found = [os.getpid()]
    for pid in found:
        found.extend(children[pid])
    return found[1:]


def end_descendants(grace: float) -> None:
    """End all descendants and return when they are gone: SIGTERM, and SIGKILL after `grace` seconds.

    A process that had children, such as torchrun, is killed as soon as it has none. With `adopt_orphans` nothing escapes: a
    process that loses its parent meanwhile becomes a child of this one.
    """
    deadline = time.monotonic() + grace
    asked = descendants()
    had_children = set(asked) & set(_parents().values())
    _signal(asked, signal.SIGTERM)
    while _reap() and (left := descendants()):
        late = time.monotonic() > deadline
        have_children = set(_parents().values())
        _signal([pid for pid in left if late or (pid in had_children - have_children)], signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> bool:
    """Reap dead children; returns whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _parents() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # `pid (name) state parent ...`, and the name may hold spaces and parentheses itself
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    return parents
