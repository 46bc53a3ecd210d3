"""Progress of a part of the work: the function that reports it, and an estimate of the time left."""

import time
from collections.abc import Callable

Emit = Callable[..., None]  # `EventWriter.emit` or a stand-in


def seconds_left(started: float, done: float, total: float, before: float = 0) -> float | None:
    """The estimate, if what was done since `started` by the monotonic clock goes on as fast; `before` was done earlier."""
    here = done - before
    return (time.monotonic() - started) / here * (total - done) if here else None
