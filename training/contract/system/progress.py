"""Progress of a part of the work: the type of a reporting function, and an estimate of the time left."""

import time
from collections.abc import Callable

Emit = Callable[..., None]  # `EventWriter.emit` or a stand-in


def seconds_left(started: float, done: float, total: float, before: float = 0) -> float | None:
    """Extrapolate the speed after `started`, a time of the monotonic clock. `before` of `done` was done earlier."""
    recent = done - before
    return (time.monotonic() - started) / recent * (total - done) if recent else None
