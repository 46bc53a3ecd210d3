"""Being asked to stop: SIGTERM from whoever ends the job, SIGINT from Ctrl-C where the ranks were started by hand.

By default either ends a process at once, which is right as long as it has nothing to save. Within the block of an
`Interruption` they are only noted, for the training loop to act on between two steps.
"""

import signal
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """`noticed`: the name of the last signal that came within the block."""

    def __init__(self) -> None:
        self.noticed: str | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._notice) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _: FrameType | None) -> None:
        self.noticed = signal.Signals(number).name
