"""The events of a job, written into the log of a run for people to read."""

from dataclasses import replace
from logging import Logger

from assets.pipeline import Services
from training.contract.events import Event

_SECONDS_BETWEEN_LINES = 5.0


class _Lines:
    """Writes phases and notes at once, and progress every few seconds."""

    def __init__(self, log: Logger, asset: str):
        self._log, self._asset, self._last = log, asset, 0.0
        self._step = ""

    def hear(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("phase", "note"):
            self._log.info(f"{self._asset}: {event.get('phase') or event.get('text')}")
        elif kind == "step":
            self._step = f", loss {event['loss']:.4f}"
        elif kind == "progress" and (event["time"] - self._last > _SECONDS_BETWEEN_LINES):
            self._last = event["time"]
            left = "" if event["seconds_left"] is None else f", {event['seconds_left']:.0f} s left"
            self._log.info(f"{self._asset}: {event['done']:,} of {event['total']:,} {event['unit']}{self._step}{left}")


def with_log(services: Services, log: Logger, asset: str) -> Services:
    """The same services; their listener hears of which asset the events are, and `log` has them as lines."""
    lines = _Lines(log, asset)

    def hear(event: Event) -> None:
        lines.hear(event)
        services.listener({**event, "asset": asset})

    return replace(services, listener=hear)
