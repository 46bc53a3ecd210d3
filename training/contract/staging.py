"""Staging folders, and removing those of dead processes.

Beside each folder lies a lock file, which the process that writes the folder holds. The kernel releases it when the process
dies, in whatever way, so process ids, ages and machines do not matter: a folder whose lock is free is abandoned.

Between creating a lock file and locking it, a process may lose the file to another one that removes abandoned folders.
It then sees that the file it has locked is no longer the one of that name, and takes another name.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".lock"


@dataclass(frozen=True)
class Claim:
    """A folder, and the lock that shows that its process lives."""

    folder: Path
    lock: BinaryIO

    def give_up(self) -> None:
        """Remove the folder, unless it was renamed away, and the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        Path(self.lock.name).unlink(missing_ok=True)
        self.lock.close()


def claim_folder(parent: Path) -> Claim:
    """A new, empty folder in `parent`. Raises OSError."""
    while True:
        name = secrets.token_hex(8)
        if lock := _try_lock(parent / f"{name}{_SUFFIX}"):
            (parent / name).mkdir()
            return Claim(parent / name, lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of dead processes; one that this user may not remove stays."""
    for path in parent.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if lock := _try_lock(path):
                Claim(path.with_suffix(""), lock).give_up()


def _try_lock(path: Path) -> BinaryIO | None:
    """The lock in the file `path`, without waiting; None if another process has it, or has removed the file."""
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None
