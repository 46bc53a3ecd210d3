"""Remove artifacts from a store while other processes use it.

A process makes or reuses an artifact under the lock of its key, and marks it as used. The lock prevents a removal at the same
time. The mark keeps an artifact with a use after the decision to remove it.

The keys go first, so no key leads to a missing artifact. Then one rename removes the artifact, so readers never see half of it.
"""

import contextlib
import os
from collections import defaultdict
from pathlib import Path

from training.contract.store.artifact import DerivationRecord
from training.contract.store.store import Store
from training.contract.system.locks import holding


def keys_by_fingerprint(store: Store, kind: str) -> dict[str, list[str]]:
    """Return the keys of every artifact of `kind`, without unreadable records."""
    keys: dict[str, list[str]] = defaultdict(list)
    for path in (store.root / "keys" / kind).glob("*.json"):
        with contextlib.suppress(ValueError, FileNotFoundError):
            keys[DerivationRecord.loads(path.read_bytes()).fingerprint].append(path.stem)
    return keys


def remove_artifact(store: Store, kind: str, fingerprint: str, keys: list[str], used: int | None) -> bool:
    """Remove an artifact with the records of its `keys`. Return False and remove nothing if it is in use.

    `used` is the result of `store.used` before `keys` were read: a key that was added later counts as use.
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
    """Return the bytes freed by removing `folder`: files with another hard link, such as released weights, free none."""
    files = (path.lstat() for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sum(file.st_size for file in files if file.st_nlink == 1)
