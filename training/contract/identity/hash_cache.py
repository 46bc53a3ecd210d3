"""A cache of file hashes: unchanged files are not read again.

An entry holds the file's stamp at the time of hashing: device, inode, size, modification time and change time, the times in
nanoseconds. It is valid only while all five are the same.

* An edit of the same size changes both times. Resetting the modification time (`touch -r`, `cp -p`, `rsync -t`) sets the
  change time to the current time; programs cannot choose it. A file renamed over another has another inode.
* Two edits within one tick of the filesystem's clock, up to a second, may leave the same times. So a hash is kept only if the
  last change was at least `settle_seconds` earlier: every later edit falls into a later tick. Git treats its "racy" index
  entries in the same way. A younger file, or one with a time in the future, is hashed each time.
* If a file changes while it is hashed, its hash is kept under the earlier stamp, which never occurs again.

Three changes go unseen: a bit lost by the disk, without any write; writes through a shared memory mapping, or one huge write in
progress; writes on a file server with a clock behind ours by more than `settle_seconds`. So the cache is for display
(`status`, `plan`); before computing with an artifact, its files are hashed.

The cache is a JSON file with its own checksum. It is read once. A writer replaces it in one step under a lock, with the entries
of other writers. An unreadable cache counts as empty, and a failed write only costs time.
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
# The stamp and the digest, by kind of digest, then by absolute path.
Entries = dict[str, dict[str, tuple[Stamp, Any]]]


class HashCache:
    """The cache in the file `path`, which need not exist. `settle_seconds` must exceed a tick of the filesystem's clock."""

    def __init__(self, path: Path, settle_seconds: float = SETTLE_SECONDS) -> None:
        self._path, self._settle_ns = path, int(settle_seconds * 1e9)
        self._entries: Entries | None = None

    def digests(
        self, kind: str, files: Sequence[Path], compute: Callable[[Sequence[Path]], Sequence[Any]]
    ) -> list[Any]:
        """Return a digest for each file. Call `compute` once, with the files without a valid entry.

        `kind` names the digest; a digest is any JSON value. Raises FileNotFoundError, and the errors of `compute`.
        """
        stamps = {file: _take_stamp(file) for file in files}
        started_ns = time.time_ns()
        digests = {file: digest for file in files if (digest := self._get(kind, file, stamps[file])) is not None}
        unknown = [file for file in stamps if file not in digests]
        if unknown:
            computed = dict(zip(unknown, compute(unknown), strict=True))
            self._add(
                kind,
                {
                    str(file.absolute()): (stamps[file], digest)
                    for file, digest in computed.items()
                    if started_ns - _changed_ns(stamps[file]) >= self._settle_ns
                },
            )
            digests |= computed
        return [digests[file] for file in files]

    def _get(self, kind: str, file: Path, stamp: Stamp) -> Any | None:
        if self._entries is None:
            self._entries = _read_entries(self._path)
        known, digest = self._entries.get(kind, {}).get(str(file.absolute()), (None, None))
        return digest if known == stamp else None

    def _add(self, kind: str, added: dict[str, tuple[Stamp, Any]]) -> None:
        if not added:
            return
        try:
            with locked(self._path.with_name(self._path.name + ".lock")):
                entries = _drop_missing_files(_read_entries(self._path))
                entries[kind] = entries.get(kind, {}) | added
                write_durably(self._path, _serialize(entries))
        except OSError as error:
            _LOG.warning("cannot cache the hashes of %d files in %s: %s", len(added), self._path, error)
            return
        self._entries = entries


def file_hashes(files: Sequence[Path], cache: HashCache | None) -> list[str]:
    """Return the sha256 of each file; with a `cache`, unchanged files are not read."""
    return cache.digests("bytes", files, hash_files) if cache else hash_files(files)


def _take_stamp(file: Path) -> Stamp:
    return list(take_stamp(file))  # a list, to compare it with JSON


def _changed_ns(stamp: Stamp) -> int:
    return max(stamp[3:])


def _drop_missing_files(entries: Entries) -> Entries:
    return {kind: {p: e for p, e in known.items() if os.path.exists(p)} for kind, known in entries.items()}  # noqa: PTH110


def _serialize(entries: Entries) -> bytes:
    content = {"schema": _SCHEMA, "entries": entries}
    return canonical_json({**content, "sha256": value_digest(content).hex()})


def _read_entries(path: Path) -> Entries:
    """Return the entries of the file; no entries if it is missing, damaged, or of another schema."""
    try:
        content = json.loads(path.read_bytes())
        promised = content.pop("sha256")
        if content["schema"] != _SCHEMA or value_digest(content).hex() != promised:
            return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    entries: Entries = content["entries"]
    return entries
