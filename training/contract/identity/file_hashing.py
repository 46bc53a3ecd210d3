"""Hash files in parallel, one per core, and report progress if that takes long.

Commands, assets and jobs hash files. A model of 140 GB on a network disk takes minutes. A caller with a progress display
enters `report_hashing_to` once; the functions in between need no extra argument.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from training.contract.system.cgroups import cores
from training.contract.system.progress import Emit, seconds_left

Item = TypeVar("Item")
Result = TypeVar("Result")
Tally = Callable[[int], None]  # is called with the number of bytes read after the last call

_PATIENCE_SECONDS = 2.0  # shorter work is not reported
_BETWEEN_SECONDS = 0.5
_MEGABYTE = 10**6
_MOST_HASHERS = 16
_EMIT: ContextVar[Emit] = ContextVar("_EMIT")


@contextlib.contextmanager
def report_hashing_to(emit: Emit) -> Iterator[None]:
    """Report long hashing within the block to `emit`, as a phase with progress. Only one thread at a time calls it."""
    token = _EMIT.set(emit)
    try:
        yield
    finally:
        _EMIT.reset(token)


def hash_file(path: Path) -> str:
    """Return the sha256 of the file's bytes, in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file, in hexadecimal."""
    return hash_in_threads(lambda path, count: digest_file(path, hashlib.sha256(), count), paths, paths)


def digest_file(path: Path, digest: "hashlib._Hash", count: Tally) -> str:
    """Update `digest` with the file's bytes and return it, in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(_CountingReader(file, count), lambda: digest).hexdigest()


def hash_in_threads(
    hash_one: Callable[[Item, Tally], Result], items: Sequence[Item], files: Sequence[Path]
) -> list[Result]:
    """Call `hash_one` with each item, in threads: hashing a block releases the GIL. `files` give the total of bytes.

    Raises the first error, in the order of items. An error or Ctrl-C ends the other threads at their next block.
    """
    meter = _Meter(_EMIT.get(None), files)
    with ThreadPoolExecutor(_threads()) as pool:
        try:
            results = list(pool.map(lambda item: hash_one(item, meter.count), items))
        except BaseException:
            meter.is_stopped = True
            raise
    meter.finish()
    return results


@cache
def _threads() -> int:
    """Return the number of hashing threads: one per core, at most 16, because then the disk is the bottleneck."""
    return min(_MOST_HASHERS, cores())


class _Stopped(Exception):
    """Another thread failed, or the user stopped the program."""


class _Meter:
    """Counts the bytes read from `files`, and reports them to `emit`."""

    def __init__(self, emit: Emit | None, files: Sequence[Path]) -> None:
        self.is_stopped = False
        self._emit, self._files = emit, files
        self._lock, self._has_reported = threading.Lock(), False
        self._began, self._done = time.monotonic(), 0
        self._next_report = self._began + _PATIENCE_SECONDS

    @cached_property
    def _total(self) -> int:
        return sum(file.stat().st_size for file in self._files)

    def count(self, size: int) -> None:
        if self.is_stopped:
            raise _Stopped
        with self._lock:
            self._done += size
            clock = time.monotonic()
            if self._emit is None or clock < self._next_report:
                return
            self._next_report = clock + _BETWEEN_SECONDS
            if not self._has_reported:
                self._has_reported = True
                self._emit("phase", phase=f"hashing {os.path.commonpath([file.absolute() for file in self._files])}")
            self._report(self._emit, min(self._done, self._total))  # a file may grow meanwhile

    def finish(self) -> None:
        if self._emit is not None and self._has_reported:
            self._report(self._emit, self._total)

    def _report(self, emit: Emit, done: int) -> None:
        left = seconds_left(self._began, done, self._total)
        emit("progress", done=done // _MEGABYTE, total=self._total // _MEGABYTE, unit="MB", seconds_left=left)


class _CountingReader:
    """A file for `hashlib.file_digest`; it counts the bytes read."""

    def __init__(self, file: Any, count: Tally) -> None:
        self._file, self._count = file, count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        size: int = self._file.readinto(buffer)
        self._count(size)
        return size
