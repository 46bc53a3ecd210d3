"""Locks: files that a process holds by `flock`. The kernel frees one when the last process that has it open ends.

So process ids, ages, clocks and machines do not matter: whoever sees the file can try the lock.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Hold the lock in the file `path`, after waiting for its holder: another process, or another thread of this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def holding(paths: Iterable[Path]) -> Iterator[bool]:
    """Hold all of the locks, without waiting; False if another process holds one."""
    with contextlib.ExitStack() as held:
        for path in paths:
            if (lock := try_lock(path)) is None:
                yield False
                return
            held.enter_context(lock)
        yield True


def try_lock(path: Path) -> BinaryIO | None:
    """The lock in the file `path`, without waiting; None if another process has it, or has removed the file meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock. It is tried as a shared lock, so that two who ask do not see each other."""
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
