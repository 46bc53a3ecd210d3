"""What Linux offers to leave no process behind: parent-death signals, adopted orphans, and /proc to see who is whose.

Process groups do not serve: torchrun gives every rank a session of its own, so a signal to the group misses the ranks.
Nothing here goes by a process's name: only what descends from the calling process is ever ended.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `number` when the thread that forked it ends. Kept by exec, not by fork.

    A parent that is gone already sends no signal: compare the parent with the expected one after this call.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ancestors() -> list[int]:
    """The process ids above this process, nearest first."""
    parents, found = _parents(), [os.getppid()]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


def descendants() -> list[int]:
    """The process ids below this process, in any session, dead ones that nobody has waited for included."""
    children = defaultdict(list)
    for pid, parent in _parents().items():
        children[parent].append(pid)
    found = [os.getpid()]
    for pid in found:
        found.extend(children[pid])
    return found[1:]


def end_descendants(grace: float) -> None:
    """End everything below this process and return when it is gone: SIGTERM, and SIGKILL after `grace` seconds.

    Who was there for the processes below it, as torchrun is, ends when the last of those is gone. With `adopt_orphans`
    nothing escapes: who loses its parent meanwhile becomes a child of this process.
    """
    deadline = time.monotonic() + grace
    asked = descendants()
    overseers = set(asked) & set(_parents().values())
    _signal(asked, signal.SIGTERM)
    while _reap() and (left := descendants()):
        late = time.monotonic() > deadline
        needed = set(_parents().values())
        _signal([pid for pid in left if late or (pid in overseers and pid not in needed)], signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> bool:
    """Wait for the children that are dead; whether any child is left."""
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


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")
