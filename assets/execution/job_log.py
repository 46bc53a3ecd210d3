"""Events of a job as lines of text: in the log of a run, or in a command's output if it is not a terminal."""

import time
from collections.abc import Callable
from dataclasses import replace
from logging import Logger

from assets.pipeline.pipeline import Services
from training.contract.protocol.events import Event

_SECONDS_BETWEEN_LINES, _MOST_SECONDS_BETWEEN_LINES = 5.0, 300.0
_SHARE_OF_ELAPSED_TIME = 0.01


class EventLines:
    """Writes phases and notes at once. Writes progress every few `seconds` at first, and less often over time.

    The last progress of a phase is written before the next one. The interval grows to five minutes: a week would otherwise
    leave a hundred thousand lines, too many for a run's page.
    """

    def __init__(self, write: Callable[[str], object], asset: str, seconds: float = _SECONDS_BETWEEN_LINES):
        self._write, self._asset, self._seconds, self._last = write, asset, seconds, 0.0
        self._first: float | None = None
        self._step = self._unwritten = ""

    def on_event(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("phase", "note"):
            if kind == "phase" and self._unwritten:
                self._write(self._unwritten)
                self._unwritten = ""
            self._write(f"{self._asset}: {event.get('phase') or event.get('text')}")
        elif kind == "step":
            self._step = f", loss {event['loss']:.4f}"
        elif kind == "progress":
            left = "" if event["seconds_left"] is None else f", {event['seconds_left']:.0f} s left"
            self._unwritten = (
                f"{self._asset}: {event['done']:,} of {event['total']:,} {event['unit']}{self._step}{left}"
            )
            if event["time"] - self._last > self._interval(event["time"]):
                self._last = event["time"]
                self._write(self._unwritten)
                self._unwritten = ""

    def _interval(self, now: float) -> float:
        self._first = now if self._first is None else self._first
        return max(self._seconds, min(_SHARE_OF_ELAPSED_TIME * (now - self._first), _MOST_SECONDS_BETWEEN_LINES))


def with_log(services: Services, log: Logger, asset: str) -> Services:
    """Return services with a listener that adds the asset to each event and writes lines to `log`."""
    lines, errors = EventLines(log.info, asset), EventLines(log.error, asset)

    def on_event(event: Event) -> None:
        (errors if event.get("is_stuck") else lines).on_event(event)
        services.listener({**event, "asset": asset})

    return replace(services, listener=on_event)


def log_phase(services: Services, log: Logger, asset: str, phase: str) -> None:
    """Report a phase of work in this process in the same way as a job's events."""
    with_log(services, log, asset).listener({"event": "phase", "time": time.time(), "phase": phase})


def log_message(services: Services, log: Logger, asset: str, text: str) -> None:
    """Report a message in the same way as a job's events."""
    with_log(services, log, asset).listener({"event": "note", "time": time.time(), "text": text})
