"""Lock files, held with `flock`. The kernel frees a lock when the last process with the open file ends.

So process ids, ages and clocks do not matter, and another machine with the same file can try the lock.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Wait for the lock in the file `path`, then hold it. The holder may be a process or another thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def holding(paths: Iterable[Path]) -> Iterator[bool]:
    """Hold all of the locks, without waiting. Yield False if another process holds one."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            if (lock := try_lock(path)) is None:
                yield False
                return
            stack.enter_context(lock)
        yield True


def try_lock(path: Path) -> BinaryIO | None:
    """Lock the file `path` without waiting. Return None if another process holds it, or removes the file meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None


def is_held(path: Path) -> bool:
    """Return whether a living process holds the lock. Try a shared lock, so two callers do not disturb each other."""
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
