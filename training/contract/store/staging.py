"""Staging folders, and removing those of dead processes.

Beside each folder lies a lock file, which the process that writes the folder holds as long as it lives: a folder whose lock
is free is abandoned.

Between creating a lock file and locking it, a process may lose the file to another one that removes abandoned folders.
It then sees that the file it has locked is no longer the one of that name, and takes another name.
"""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from training.contract.system.locks import try_lock

_SUFFIX = ".lock"


@dataclass(frozen=True)
class LockedFolder:
    """A folder, and the lock that shows that its process lives."""

    folder: Path
    lock: BinaryIO

    def give_up(self) -> None:
        """Remove the folder, unless it was renamed away, and the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        Path(self.lock.name).unlink(missing_ok=True)
        self.lock.close()


def claim_folder(parent: Path) -> LockedFolder:
    """A new, empty folder in `parent`, from which those of dead processes are removed first. Raises OSError."""
    _remove_abandoned(parent)
    while True:
        name = secrets.token_hex(8)
        if lock := try_lock(parent / f"{name}{_SUFFIX}"):
            (parent / name).mkdir()
            return LockedFolder(parent / name, lock)


@contextlib.contextmanager
def claimed(parent: Path) -> Iterator[Path]:
    """`claim_folder` for a while: at the end the folder is removed, unless it was renamed away. Raises OSError."""
    claim = claim_folder(parent)
    try:
        yield claim.folder
    finally:
        claim.give_up()


def lock_beside(folder: Path) -> Path:
    """The lock of a folder that was claimed."""
    return folder.with_name(f"{folder.name}{_SUFFIX}")


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of dead processes; one that this user may not remove stays."""
    for path in parent.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if lock := try_lock(path):
                LockedFolder(path.with_suffix(""), lock).give_up()
