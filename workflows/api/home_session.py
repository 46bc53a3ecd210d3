"""A home in this process: its environment variables, services and Dagster instance during a call of the Python interface.

A command ends with its process, so it may set PEDIGREE_HOME and DAGSTER_HOME for good. A notebook goes on, perhaps with another
home. So the variables are set when the first call in a home begins, and restored when the last one ends. A process has one
environment: a call in another home meanwhile raises UsageError.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path

import dagster as dg

from assets.pipeline.pipeline import Services, emitting, ignore
from training.contract.errors import UsageError
from training.contract.files.hub import pin_hub_revisions
from training.contract.identity.file_hashing import report_hashing_to
from training.contract.identity.fingerprint import check_text
from workflows.api.event_loop import no_running_loop
from workflows.cli.output import SanitizedConsole
from workflows.cli.progress import ProgressBars
from workflows.orchestration.resources import build_services, dagster_instance

_HOME, _DAGSTER_HOME = "PEDIGREE_HOME", "DAGSTER_HOME"
_NO_ASSET = "files"  # the name of the progress of hashing, as in commands


class _Environment:
    """The variables of one home, while calls in it run. Several threads may call at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._home: Path | None = None
        self._calls = 0
        self._saved: dict[str, str | None] = {}

    def user_value(self, name: str) -> str | None:
        """Return the user's value of a variable, also while a call has replaced it."""
        with self._lock:
            return self._saved[name] if self._calls else os.environ.get(name)

    @contextmanager
    def of(self, home: Path) -> Iterator[None]:
        """Set the variables for `home` in the block. Raise UsageError during a call in another home."""
        self._enter(home)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, home: Path) -> None:
        with self._lock:
            if self._calls and home != self._home:
                raise UsageError(
                    f"another thread of this process works in the home {self._home}, so {home} cannot be used now: wait until "
                    "its call returns, or use one process for each home",
                    "two-homes",
                )
            if not self._calls:
                self._saved = {name: os.environ.get(name) for name in (_HOME, _DAGSTER_HOME)}
                self._home, os.environ[_HOME] = home, str(home)
            self._calls += 1

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls:
                return
            for name, value in self._saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


_ENVIRONMENT = _Environment()


def resolve_home(home: str | PathLike[str] | None) -> Path:
    """Return the absolute path of `home`; by default of PEDIGREE_HOME, else of .pedigree in the working directory.

    Raises UsageError if its path is not text, or if DAGSTER_HOME is set and belongs to another home.
    """
    default = Path(_ENVIRONMENT.user_value(_HOME) or ".pedigree").absolute()
    found = default if home is None else Path(home).expanduser().absolute()
    check_text(found)
    records = _ENVIRONMENT.user_value(_DAGSTER_HOME)
    if records and found != default:
        raise UsageError(
            f"{_DAGSTER_HOME} is {records}, which has the records of the home {default}: to use {found}, unset "
            f"{_DAGSTER_HOME}, or set {_HOME} to {found} if the records belong to it",
            "two-homes",
        )
    return found


@contextmanager
def open_home(home: Path, progress: bool = False) -> Iterator[tuple[Services, dg.DagsterInstance]]:
    """Yield the services and the Dagster instance of `home`, which is made if missing.

    With `progress`, show the progress of jobs and of hashing on stderr: bars in a terminal, else lines. The whole block uses
    one state of the Hub.
    """
    with ExitStack() as stack:
        stack.enter_context(_ENVIRONMENT.of(home))
        stack.enter_context(no_running_loop())
        stack.enter_context(pin_hub_revisions())
        listener = ignore
        if progress:
            console = SanitizedConsole(stderr=True, highlight=False)
            listener = stack.enter_context(ProgressBars(console)).on_event
        instance = stack.enter_context(dagster_instance())
        stack.enter_context(report_hashing_to(emitting(listener, _NO_ASSET)))
        yield build_services(home, listener), instance
