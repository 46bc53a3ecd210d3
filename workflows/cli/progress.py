"""The progress of jobs in the terminal: bars, or plain lines if stderr is not a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import dagster as dg
from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from assets.execution.job_log import EventLines
from assets.pipeline.pipeline import Services, emitting
from training.contract.identity.file_hashing import report_hashing_to
from training.contract.protocol.events import Event
from workflows.cli.output import user_console
from workflows.orchestration.resources import build_services, dagster_instance, pedigree_home

_SECONDS_BETWEEN_LINES = 10.0
_NO_ASSET = "files"
_REMAINING_WIDTH = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # figures come before text


@contextmanager
def at_work() -> Iterator[tuple[Services, dg.DagsterInstance]]:
    """Yield the services and the Dagster instance for a command. Meanwhile show the progress of jobs and of hashing."""
    with (
        ProgressBars(user_console) as progress,
        dagster_instance() as instance,
        report_hashing_to(emitting(progress.on_event, _NO_ASSET)),
    ):
        yield build_services(pedigree_home(), progress.on_event), instance


class _Count(progress.MofNCompleteColumn):
    """Done and total; nothing for a phase without a count."""

    def render(self, task: progress.Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class ProgressBars:
    """One line per asset while its job runs: progress, phase, loss, and time left.

    If the console is not a terminal, as in CI, print a line for each phase, and one every ten seconds, later fewer.
    """

    def __init__(self, console: Console):
        self._console = console
        self._lines: dict[str, EventLines] = {}
        self._bars = progress.Progress(
            progress.TextColumn("{task.description:<20}"),
            progress.BarColumn(bar_width=12),
            _Count(),
            progress.TextColumn("{task.fields[unit]}  {task.fields[left]}"),
            progress.TextColumn("{task.fields[detail]}", table_column=_REMAINING_WIDTH),
            expand=True,
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, progress.TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def on_event(self, event: Event) -> None:
        if not self._console.is_terminal:
            self._lines_of(event["asset"]).on_event(event)
            return
        task = self._task(event["asset"])
        match event["event"]:
            case "phase":
                self._bars.tasks[task].total = None  # None in `update` means unchanged
                self._bars.update(task, completed=0, unit="", left="", detail=escape(event["phase"]))
            case "note":
                style = "bold red" if event.get("is_stuck") else None
                self._bars.console.print(f"{event['asset']}: {escape(event['text'])}", style=style)
                if "queue" in event:
                    self._bars.update(task, detail=escape(event["text"]))
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
