"""A cache of file hashes: a file that has not changed since it was hashed is not read again.

An entry has a stamp of the file from when it was hashed: device, inode, size, modification time and change time, the times
in nanoseconds. It is valid only while all five are the same.

* An edit that keeps the size changes both times. Setting the modification time back, as `touch -r`, `cp -p` and `rsync -t`
  do, sets the change time to now, which no program can choose. A file renamed over another has another inode.
* Two edits within one tick of the filesystem's clock, up to a second, may leave the same times. So a hash is kept only if the
  file's last change was at least `settle_seconds` earlier: every later edit then falls into a later tick. This is how Git
  treats its "racy" index entries. A younger file, or one with a time in the future, is hashed each time.
* A hash of a file that changes while it is being hashed is kept under the stamp from before, which never occurs again.

Three things go unseen: a bit that the disk lost (nobody wrote, so no time changed), a program that writes through a
shared memory mapping or is in the middle of one huge write in place, and a file server whose clock is behind ours by more
than `settle_seconds`. So the cache is for looking (`status`, `plan`); to compute with an artifact, its files are hashed.

The cache is a JSON file with a checksum of its own. It is read once, and replaced in one step under a lock, together with
the entries of other writers; an unreadable one counts as empty, and failing to write it only costs time.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.contract.identity.file_hashing import hash_files
from training.contract.identity.file_stamps import SETTLE_SECONDS, take_stamp
from training.contract.identity.fingerprint import canonical_json, value_digest
from training.contract.system.atomic_io import write_durably
from training.contract.system.locks import locked

_SCHEMA = 1
_LOG = logging.getLogger(__name__)

Stamp = list[int]
# By kind of digest, then by absolute path: the stamp and the digest.
Entries = dict[str, dict[str, tuple[Stamp, Any]]]


class HashCache:
    """The cache in the file `path`, which need not exist. `settle_seconds` covers the coarsest clock of a filesystem."""

    def __init__(self, path: Path, settle_seconds: float = SETTLE_SECONDS) -> None:
        self._path, self._settle_ns = path, int(settle_seconds * 1e9)
        self._entries: Entries | None = None

    def digests(
        self, kind: str, files: Sequence[Path], compute: Callable[[Sequence[Path]], Sequence[Any]]
    ) -> list[Any]:
        """A digest for each file; `compute` is called once, with the files that have no valid entry.

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
            with locked(self._path.with_name(self._path.name + ".lock")):
                entries = _without_lost_files(_read(self._path))
                entries[kind] = entries.get(kind, {}) | fresh
                write_durably(self._path, _serialized(entries))
        except OSError as error:
            _LOG.warning("the hashes of %d files are not remembered: %s", len(fresh), error)
            return
        self._entries = entries


def file_hashes(files: Sequence[Path], cache: HashCache | None) -> list[str]:
    """The sha256 of each file; with a `cache`, those unchanged since they were hashed are not read."""
    return cache.digests("bytes", files, hash_files) if cache else hash_files(files)


def _stamp(file: Path) -> Stamp:
    return list(take_stamp(file))  # as JSON gives it back


def _changed_ns(stamp: Stamp) -> int:
    return max(stamp[3:])


def _without_lost_files(entries: Entries) -> Entries:
    return {kind: {p: e for p, e in known.items() if os.path.exists(p)} for kind, known in entries.items()}  # noqa: PTH110


def _serialized(entries: Entries) -> bytes:
    content = {"schema": _SCHEMA, "entries": entries}
    return canonical_json({**content, "sha256": value_digest(content).hex()})


def _read(path: Path) -> Entries:
    """The entries of the file; none where it is missing, of another schema, or damaged."""
    try:
        content = json.loads(path.read_bytes())
        promised = content.pop("sha256")
        if content["schema"] != _SCHEMA or value_digest(content).hex() != promised:
            return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    entries: Entries = content["entries"]
    return entries
