"""Events: the reports of a running job, one JSON object per line of `events.jsonl`.

The field `event` is one of five kinds:
    phase     {"event": "phase", "phase": text}                             a new part of the work begins
    progress  {"event": "progress", "done": n, "total": n, "unit": text, "seconds_left": s | null}
    step      {"event": "step", "step": n, "loss": x, ...metrics}           one line per training step, first step 1
    eval      {"event": "eval", "step": n, "eval/loss": x, ...}             held-out metrics before or after a step
    note      {"event": "note", "text": text}                               a message to the user
Every line has `time`, seconds since the epoch. A line is complete once it ends with a newline; a follower parses complete
lines only. It skips lines that are no event, because a fault of a disk must not end a job.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, cast

from training.contract.system.atomic_io import write_durably
from training.contract.system.progress import seconds_left

EventKind = Literal["phase", "progress", "step", "eval", "note"]


class Event(TypedDict, total=False):
    """An event. `step` and `eval` events also have the metrics by name.

    The launching side adds `asset`. Its own notes may have `queue`, the state of a job in a queue, and `is_stuck`.
    """

    event: Required[EventKind]
    time: Required[float]
    asset: str
    phase: str
    done: int
    total: int
    unit: str
    seconds_left: float | None
    step: int
    loss: float
    text: str
    queue: str
    is_stuck: bool


def make_event(event: str, **fields: Any) -> Event:
    """Return an event of now."""
    return cast(Event, {"event": event, "time": time.time(), **fields})


_REPORT_SECONDS = 0.5
_COUNTED = ("step", "eval")


class EventWriter:
    """Appends events to `path`. Without a path, as on every rank but the first, it drops them."""

    def __init__(self, path: Path | None, keep: bool = False) -> None:
        self._path = path
        self._file: FileIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep and path.exists():  # cut off an incomplete line of a killed writer
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self._file = open(path, "ab" if keep else "wb", buffering=0)  # unbuffered, so a full disk fails at once

    def emit(self, event: str, **fields: Any) -> None:
        """Append an event. Raises OSError."""
        if self._file is None:
            return
        unwritten = _encode_line(make_event(event, **fields))
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    def phase(self, phase: str) -> None:
        self.emit("phase", phase=phase)

    def note(self, text: str) -> None:
        self.emit("note", text=text)

    def rewind(self, step: int) -> None:
        """Drop `step` events after `step`, and `eval` events from `step` on: an interrupted run resumes there.

        Drop lines that are no event, too, and note them and the steps without metrics.
        """
        if self._path is None or self._file is None:
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        events = [event for line in lines if (event := _parse_line(line)) is not None]
        last = {"step": step, "eval": step - 1}
        kept = [event for event in events if event["event"] not in last or event["step"] <= last[event["event"]]]
        if len(kept) < len(lines):
            self._file.close()
            write_durably(self._path, b"".join(map(_encode_line, kept)))
            self._file = open(self._path, "ab", buffering=0)
        if unreadable := len(lines) - len(events):
            self.note(f"{unreadable} lines of {self._path} cannot be read and were removed; check the disk")
        missing = sorted(set(range(1, step + 1)) - {event["step"] for event in kept if event["event"] == "step"})
        if missing:
            self.note(
                f"the metrics of {len(missing)} of {step} steps (first {missing[0]}, last {missing[-1]}) are missing in "
                f"{self._path}: charts and the artifact lack them; the training itself is complete"
            )


class Progress:
    """Reports the progress of a part of the work, at most twice a second, with an estimate of the seconds left.

    `done` counts work of an earlier attempt, which the estimate leaves out. If other code counted a too low `total`, the
    progress stops there.
    """

    def __init__(self, writer: EventWriter, total: int, unit: str, done: int = 0) -> None:
        self._writer, self._total, self._unit = writer, total, unit
        self._started = self._reported = time.monotonic()
        self._done_earlier = self._done = done

    def advance(self, count: int = 1) -> None:
        previous, self._done = self._done, min(self._done + count, self._total)
        clock = time.monotonic()
        if previous == self._total or (clock - self._reported < _REPORT_SECONDS and self._done < self._total):
            return
        self._reported = clock
        left = seconds_left(self._started, self._done, self._total, self._done_earlier)
        self._writer.emit("progress", done=self._done, total=self._total, unit=self._unit, seconds_left=left)


def read_events(path: Path) -> Iterator[Event]:
    """Yield all complete events of the file, in order; none if the file is missing."""
    yield from Follower(path).new()


class Follower:
    """Reads a growing events file. Each call of `new` yields the new complete events.

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
                if (event := _parse_line(line)) is not None:
                    yield event

    def _restart_if_replaced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_size < self._offset or (self._inode is not None and status.st_ino != self._inode):
            self._offset = 0
        self._inode = status.st_ino


def _parse_line(line: bytes) -> Event | None:
    """Return the event of a line; None if it is no event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("event"), str) and "time" in event
    is_valid = is_event and (event["event"] not in _COUNTED or isinstance(event.get("step"), int))
    return cast(Event, event) if is_valid else None


def _encode_line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, allow_nan=False, ensure_ascii=False).encode() + b"\n"
