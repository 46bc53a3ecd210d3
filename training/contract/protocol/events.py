"""Events: how a running job reports, one JSON object a line in `events.jsonl`.

Five kinds, named by `event`:
    phase     {"event": "phase", "phase": text}                             a new part of the work begins
    progress  {"event": "progress", "done": n, "total": n, "unit": text, "seconds_left": s | null}
    step      {"event": "step", "step": n, "loss": x, ...metrics}           one line a training step, first step 1
    eval      {"event": "eval", "step": n, "eval/loss": x, ...}             held-out metrics before or after a step
    note      {"event": "note", "text": text}                               something a person should know
Every line has `time`, seconds since the epoch. A line is complete once its newline is there: a follower never parses a
line in the making.
"""

import json
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from training.contract.system.atomic_io import write_durably
from training.contract.system.progress import seconds_left

Event = dict[str, Any]


class EventWriter:
    """Appends events to `path`; with no path (every rank but the first) they go nowhere."""

    def __init__(self, path: Path | None, keep: bool = False) -> None:
        self._path = path
        self._file: FileIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep and path.exists():  # a killed writer may have left a line unfinished, and another is appended
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file = open(path, "ab" if keep else "wb", buffering=0)  # a buffer would keep what a full disk refused

    def emit(self, event: str, **fields: Any) -> None:
        """Raises OSError."""
        if self._file is None:
            return
        left = _line({"event": event, "time": time.time(), **fields})
        while left:
            left = left[self._file.write(left) :]

    def phase(self, phase: str) -> None:
        self.emit("phase", phase=phase)

    def note(self, text: str) -> None:
        self.emit("note", text=text)

    def rewind(self, step: int) -> None:
        """Drop what came after `step`, from which an interrupted run resumes: later step events, and eval events from it on."""
        if self._path is None or self._file is None:
            return
        events = list(read_events(self._path))
        last = {"step": step, "eval": step - 1}
        kept = [event for event in events if event["event"] not in last or event["step"] <= last[event["event"]]]
        if len(kept) == len(events):
            return
        self._file.close()
        write_durably(self._path, b"".join(map(_line, kept)))
        self._file = open(self._path, "ab", buffering=0)


class Progress:
    """Reports the progress of a part of the work, at most twice a second, with an estimate of the seconds left.

    `done` was done by an earlier attempt: it counts as done, and not in the estimate. A `total` may be too low, where it was
    counted by other means: what is done beyond it changes nothing any more.
    """

    def __init__(self, writer: EventWriter, total: int, unit: str, done: int = 0) -> None:
        self._writer, self._total, self._unit = writer, total, unit
        self._started = self._last = time.monotonic()
        self._before = self._done = done

    def advance(self, count: int = 1) -> None:
        before, self._done = self._done, min(self._done + count, self._total)
        now = time.monotonic()
        if before == self._total or (now - self._last < 0.5 and self._done < self._total):
            return
        self._last = now
        left = seconds_left(self._started, self._done, self._total, self._before)
        self._writer.emit("progress", done=self._done, total=self._total, unit=self._unit, seconds_left=left)


def read_events(path: Path) -> Iterator[Event]:
    """Every complete event of the file, in order; none if there is no file yet."""
    yield from Follower(path).new()


class Follower:
    """Reads a growing events file: each call of `new` gives the complete lines that were added since the last one.

    After a rewind it starts over, so a step may come more than once.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._inode: int | None = None

    def new(self) -> Iterator[Event]:
        try:
            file = open(self._path, "rb")
        except FileNotFoundError:
            return
        with file:
            self._restart_if_replaced(file.fileno())
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)

    def _restart_if_replaced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if found.st_size < self._offset or (self._inode is not None and found.st_ino != self._inode):
            self._offset = 0
        self._inode = found.st_ino


def _line(event: Event) -> bytes:
    return json.dumps(event, allow_nan=False, ensure_ascii=False).encode() + b"\n"
