"""Removing artifacts from a store while other processes use it: one that is made or read under a key's lock stays.

First its keys are removed, so that no key leads to a missing artifact; then it is renamed away in one step, so that nobody
ever sees half of one.
"""

import contextlib
import os
from collections import defaultdict
from pathlib import Path

from training.contract.locks import holding
from training.contract.store import Record, Store


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
            store.record_file(kind, key).unlink(missing_ok=True)
        with store.staging() as staging, contextlib.suppress(FileNotFoundError):
            os.rename(store.folder(kind, fingerprint), staging / fingerprint)
    return True


def freed_bytes(folder: Path) -> int:
    """The bytes that removing `folder` frees: none for files with another hard link, such as released weights."""
    files = (path.lstat() for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sum(file.st_size for file in files if file.st_nlink == 1)
