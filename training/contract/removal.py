"""Removing artifacts from a store while other processes use it: one that is made or read under a key's lock stays.

First its keys are removed, so that no key leads to a missing artifact; then it is renamed away in one step, so that nobody
ever sees half of one.
"""

import contextlib
import fcntl
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from training.contract.store import Record, Store


def is_held(lock: Path) -> bool:
    """Whether a living process holds the lock in the file `lock`."""
    try:
        file = open(lock, "rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextlib.contextmanager
def holding(locks: Iterable[Path]) -> Iterator[bool]:
    """Hold all of `locks`, without waiting; False if another process holds one."""
    with contextlib.ExitStack() as held:
        yield all(_try_lock(held.enter_context(_opened(lock))) for lock in locks)


def keys_by_fingerprint(store: Store, kind: str) -> dict[str, list[str]]:
    """The keys of every artifact of `kind`; unreadable records are left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (store.root / "keys" / kind).glob("*.json"):
        with contextlib.suppress(ValueError, FileNotFoundError):
            found[Record.unseal(path.read_bytes()).fingerprint].append(path.stem)
    return found


def remove_artifact(store: Store, kind: str, fingerprint: str, keys: list[str]) -> bool:
    """Remove an artifact with the records of its `keys`; False, and nothing is removed, if one of them is in use."""
    with holding(store.lock_file(kind, key) for key in keys) as free:
        if not free:
            return False
        for key in keys:
            (store.root / "keys" / kind / f"{key}.json").unlink(missing_ok=True)
        with store.staging() as staging, contextlib.suppress(FileNotFoundError):
            os.rename(store.folder(kind, fingerprint), staging / fingerprint)
    return True


def _opened(lock: Path) -> BinaryIO:
    lock.parent.mkdir(parents=True, exist_ok=True)
    return open(lock, "ab")


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def freed_bytes(folder: Path) -> int:
    """The bytes that removing `folder` frees: none for files with another hard link, such as released weights."""
    files = (path.lstat() for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sum(file.st_size for file in files if file.st_nlink == 1)


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
