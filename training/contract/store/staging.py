"""Staging folders, each with a lock file beside it. A folder with a free lock is abandoned: its process is dead.

Another process may remove the lock file between its creation and its locking. The locked file then no longer has its name,
and the process tries another name.
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
    """A folder and its lock, held while the process lives."""

    folder: Path
    lock: BinaryIO

    def give_up(self) -> None:
        """Remove the folder, unless it was renamed away, and the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        Path(self.lock.name).unlink(missing_ok=True)
        self.lock.close()


def claim_folder(parent: Path) -> LockedFolder:
    """Remove abandoned folders from `parent`, then create a new one. Raises OSError."""
    _remove_abandoned(parent)
    while True:
        name = secrets.token_hex(8)
        if lock := try_lock(parent / f"{name}{_SUFFIX}"):
            (parent / name).mkdir()
            return LockedFolder(parent / name, lock)


@contextlib.contextmanager
def claimed(parent: Path) -> Iterator[Path]:
    """Claim a folder; at the end remove it, unless it was renamed away. Raises OSError."""
    locked_folder = claim_folder(parent)
    try:
        yield locked_folder.folder
    finally:
        locked_folder.give_up()


def lock_beside(folder: Path) -> Path:
    """Return the lock file of a claimed folder."""
    return folder.with_name(f"{folder.name}{_SUFFIX}")


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of dead processes, but leave folders of other users."""
    for path in parent.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if lock := try_lock(path):
                LockedFolder(path.with_suffix(""), lock).give_up()
