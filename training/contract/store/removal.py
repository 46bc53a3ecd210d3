"""Removing artifacts from a store while other processes use it: one that came into use since it was looked at stays.

Whoever makes an artifact, or finds it in order to go on from it, does so under the lock of its key and marks it as used: the
lock keeps that and the removal from happening at once, and the mark tells the removal that it has happened.

First the artifact's keys are removed, so that no key leads to a missing artifact; then it is renamed away in one step, so that
nobody ever sees half of one.
"""

import contextlib
import os
from collections import defaultdict
from pathlib import Path

from training.contract.store.store import DerivationRecord, Store
from training.contract.system.locks import holding


def keys_by_fingerprint(store: Store, kind: str) -> dict[str, list[str]]:
    """The keys of every artifact of `kind`; unreadable records are left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (store.root / "keys" / kind).glob("*.json"):
        with contextlib.suppress(ValueError, FileNotFoundError):
            found[DerivationRecord.loads(path.read_bytes()).fingerprint].append(path.stem)
    return found


def remove_artifact(store: Store, kind: str, fingerprint: str, keys: list[str], used: int | None) -> bool:
    """Remove an artifact with the records of its `keys`; False, and nothing is removed, if it is in use.

    `used` is what the store said of it before its `keys` were read: another way that led to it since counts as use.
    """
    with holding(store.lock_file(kind, name) for name in (*keys, fingerprint)) as free:
        if not free or store.used(kind, fingerprint) != used:
            return False
        for key in keys:
            store.record_file(kind, key).unlink(missing_ok=True)
        with store.staging() as staging, contextlib.suppress(FileNotFoundError):
            os.rename(store.folder(kind, fingerprint), staging / fingerprint)
    return True


def freed_bytes(folder: Path) -> int:
    """The bytes that removing `folder` frees: none for files with another hard link, such as released weights."""
    files = (path.lstat() for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sum(file.st_size for file in files if file.st_nlink == 1)
