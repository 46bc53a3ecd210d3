"""Hashes of files that have not changed since they were hashed, so that looking at the world again costs no reading.

An entry holds what the filesystem said of the file when it was hashed: device, inode, size, modification time and change
time, the times in nanoseconds. It is believed only while all five are the same.

* An edit that keeps the size changes both times. Setting the modification time back, as `touch -r`, `cp -p` and `rsync -t`
  do, sets the change time to now, and no program can choose that one. A file renamed over another has another inode.
* Times tick: two edits within one tick, a second on some filesystems, look the same. So a file is remembered only if
  its last change was at least `settle_seconds` before it was hashed. Every later edit then falls into a later tick. This is
  Git's answer to its "racy" index entries. A file that is younger, or that claims to be from the future, is hashed each
  time until it is old enough.
* What changes while it is being hashed is remembered under what was said of it before, which is never said again.

Three things go unseen: a bit that the disk lost (nobody wrote, so no time changed), a program that writes through a
shared memory mapping or is still in the midst of one huge write in place, and a file server whose clock is behind ours by
more than `settle_seconds`. So this serves to look (`status`, `plan`), and whoever reads an artifact to compute with it hashes.

The file is JSON with a checksum of its own. It is read once and replaced in one step under a lock, each writer adding to what
the others wrote; an unreadable one counts as empty, and one that cannot be written only costs time.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training.contract.durable import write_durably
from training.contract.fingerprint import canonical_json

SETTLE_SECONDS = 2.0
_SCHEMA = 1
_LOG = logging.getLogger(__name__)

Stamp = list[int]
# By kind of digest, then by absolute path: what the filesystem said, and the digest.
Entries = dict[str, dict[str, tuple[Stamp, Any]]]


class HashCache:
    """The cache in the file `path`, which need not exist. `settle_seconds` covers the coarsest clock of a filesystem."""

    def __init__(self, path: Path, settle_seconds: float = SETTLE_SECONDS) -> None:
        self._path, self._settle_ns = path, int(settle_seconds * 1e9)
        self._entries: Entries | None = None

    def digests(
        self, kind: str, files: Sequence[Path], compute: Callable[[Sequence[Path]], Sequence[Any]]
    ) -> list[Any]:
        """A digest for each file, by `compute` (called once, with those not known) where none is remembered.

        `kind` names what `compute` computes; a digest is anything JSON holds. Raises FileNotFoundError, and what
        `compute` raises.
        """
        before = {file: _stamp(file) for file in files}
        now = time.time_ns()
        found = {file: digest for file in files if (digest := self._recall(kind, file, before[file])) is not None}
        unknown = [file for file in before if file not in found]
        if unknown:
            fresh = dict(zip(unknown, compute(unknown), strict=True))
            self._remember(
                kind,
                {
                    str(file.absolute()): (before[file], digest)
                    for file, digest in fresh.items()
                    if now - _changed_ns(before[file]) >= self._settle_ns
                },
            )
            found |= fresh
        return [found[file] for file in files]

    def _recall(self, kind: str, file: Path, stamp: Stamp) -> Any | None:
        if self._entries is None:
            self._entries = _read(self._path)
        known, digest = self._entries.get(kind, {}).get(str(file.absolute()), (None, None))
        return digest if known == stamp else None

    def _remember(self, kind: str, fresh: dict[str, tuple[Stamp, Any]]) -> None:
        if not fresh:
            return
        try:
            with _locked(self._path.with_name(self._path.name + ".lock")):
                entries = _without_lost_files(_read(self._path))
                entries[kind] = entries.get(kind, {}) | fresh
                write_durably(self._path, _serialized(entries))
        except OSError as error:
            _LOG.warning("the hashes of %d files are not remembered: %s", len(fresh), error)
            return
        self._entries = entries


def _stamp(file: Path) -> Stamp:
    said = file.stat()
    return [said.st_dev, said.st_ino, said.st_size, said.st_mtime_ns, said.st_ctime_ns]


def _changed_ns(stamp: Stamp) -> int:
    return max(stamp[3:])


def _without_lost_files(entries: Entries) -> Entries:
    return {kind: {p: e for p, e in known.items() if os.path.exists(p)} for kind, known in entries.items()}  # noqa: PTH110


def _serialized(entries: Entries) -> bytes:
    content = {"schema": _SCHEMA, "entries": entries}
    return canonical_json({**content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()})


def _read(path: Path) -> Entries:
    """What the file holds; nothing where it is missing, of another schema, or not what was written."""
    try:
        content = json.loads(path.read_bytes())
        promised = content.pop("sha256")
        if content["schema"] != _SCHEMA or hashlib.sha256(canonical_json(content)).hexdigest() != promised:
            return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    entries: Entries = content["entries"]
    return entries


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
