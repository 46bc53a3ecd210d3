"""Tell the user if a running job reports nothing for long: a process may be stopped, or wait for a disk or a network.

A job that hangs is not ended. Nobody else can know if it will go on, and a checkpoint may be long ago.
"""

import time
from collections.abc import Callable, Sequence

from training.contract.protocol.events import Event

# Far more than the longest wait so far: an evaluation, or the compilation of a model, reports nothing for a while.
_SHORTEST_SECONDS, _TIMES_LONGEST = 120.0, 10.0


class StallDetector:
    """Measures the time since the last event of a job. Each further note comes after twice the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._longest, self._noted = clock, clock(), 0.0, 0.0
        self._doing = "start"

    def on_event(self, event: Event) -> None:
        """Take note of an event."""
        now = self._clock()
        self._longest, self._last, self._noted = max(self._longest, now - self._last), now, 0.0
        if event["event"] == "phase":
            self._doing = event["phase"]
        elif event["event"] == "step":
            self._doing = f"step {event['step'] + 1:,}"

    def note(self, kind: str, stopped: Callable[[], Sequence[int]]) -> Event | None:
        """Return a note to the user if the silence is long, else None. `stopped` returns the stopped processes."""
        seconds = self._clock() - self._last
        if seconds < max(_SHORTEST_SECONDS, _TIMES_LONGEST * self._longest, 2 * self._noted):
            return None
        self._noted = seconds
        text = f"the {kind} job has reported nothing for {seconds:,.0f} s (before: {self._longest:,.1f} s at most)"
        text += f", in: {self._doing}"
        if pids := " ".join(map(str, stopped())):
            text += f"; processes {pids} are stopped: `kill -CONT {pids}` continues them"
        else:
            text += "; Ctrl-C ends it, and the same command goes on from the last checkpoint"
        return {"event": "note", "time": time.time(), "text": text}
