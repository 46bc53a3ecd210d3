"""What people see in the terminal while jobs run: bars, or plain lines where stderr is no terminal."""

from functools import partial
from typing import Self

from rich import progress
from rich.console import Console
from rich.markup import escape

from assets.event_log import EventLines
from training.contract.events import Event

_SECONDS_BETWEEN_LINES = 60.0


class ProgressBars:
    """One line an asset while its job runs: how far it is, what it does, the loss, and the time left.

    Where the console is no terminal, as in CI, a line for each phase, and one a minute.
    """

    def __init__(self, console: Console):
        self._console = console
        self._lines: dict[str, EventLines] = {}
        self._bars = progress.Progress(
            progress.TextColumn("{task.description:<20}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[unit]}  {task.fields[left]}  {task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, progress.TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def hear(self, event: Event) -> None:
        if not self._console.is_terminal:
            self._lines_of(event["asset"]).hear(event)
            return
        task = self._task(event["asset"])
        match event["event"]:
            case "phase":
                self._bars.update(task, completed=0, total=None, unit="", left="", detail=escape(event["phase"]))
            case "note":
                self._bars.console.print(f"{event['asset']}: {escape(event['text'])}")
            case "step":
                self._bars.update(task, detail=f"loss {event['loss']:.4f}")
            case "progress":
                seconds = event["seconds_left"]
                left = "" if seconds is None else f"{seconds:.0f} s left"
                self._bars.update(task, completed=event["done"], total=event["total"], unit=event["unit"], left=left)

    def _lines_of(self, asset: str) -> EventLines:
        if asset not in self._lines:
            write = partial(self._console.print, markup=False, soft_wrap=True)
            self._lines[asset] = EventLines(write, asset, _SECONDS_BETWEEN_LINES)
        return self._lines[asset]

    def _task(self, asset: str) -> progress.TaskID:
        if asset not in self._tasks:
            self._tasks[asset] = self._bars.add_task(asset, total=None, unit="", left="", detail="starting")
        return self._tasks[asset]
