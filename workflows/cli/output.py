"""The output of a command: the result on stdout, messages for the user on stderr, and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong use, such as a wrong recipe or option. With `--json`, stdout holds one JSON object and
nothing else; if the command fails without a result, that object has an `error`.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from typing import Concatenate, ParamSpec

import dagster as dg
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from assets.execution.interruption import INTERRUPTED
from training.contract.config.json_object import JsonObject
from training.contract.errors import PedigreeError
from training.contract.files.hub import pin_hub_revisions
from training.contract.system.atomic_io import READ_ONLY_HINT, SHARED_HOME_HINT, free_bytes
from workflows.cli.group import print_json
from workflows.orchestration import home_faults
from workflows.orchestration.resources import pedigree_home

_STDOUT, _STDERR = 1, 2  # the inherited descriptors, even if this process replaced the streams
P = ParamSpec("P")

# Errors for the user to act on: ours; those of the operating system or a database, such as a full disk or a read-only
# folder; and Ctrl-C.
REFUSALS = (PedigreeError, OSError, SQLAlchemyError, dg.DagsterExecutionInterruptedError, KeyboardInterrupt)
# Visible symbols for control characters: they could move the cursor, name the window or fill the clipboard. rich keeps most.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")


class SanitizedConsole(Console):
    """Shows text from data, templates or files without its control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_PICTURES))


results = SanitizedConsole(highlight=False)
user_console = SanitizedConsole(stderr=True, highlight=False)


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Let an error in `REFUSALS` end the command with its message and exit code, without a traceback.

    The whole command uses one state of the Hub.
    """

    @wraps(command)
    def reported(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with pin_hub_revisions():
                return command(*args, **kwargs)
        except BrokenPipeError:  # the reader stopped, as `head` does: click ends quietly
            raise
        except REFUSALS as error:
            message = explained(error)
            code = error.exit_code if isinstance(error, PedigreeError) else PedigreeError.exit_code
        except Exception as error:
            if not isinstance(error.__cause__, SQLAlchemyError):
                raise
            # Dagster's Postgres storage retries for a while, then raises its own error.
            message, code = explained(error.__cause__), PedigreeError.exit_code
        if kwargs.get("as_json"):
            print_json({"error": message})
        print_error(message)
        sys.exit(code)

    return reported


def explained(error: BaseException) -> str:
    """Return the message for one of `REFUSALS`."""
    match error:
        case KeyboardInterrupt() | dg.DagsterExecutionInterruptedError():
            return str(error) or INTERRUPTED
        case PermissionError():
            return f"{error}; {SHARED_HOME_HINT}"
        case OSError(errno=errno.EROFS):
            return f"{error}; {READ_ONLY_HINT}"
        case FileNotFoundError():
            return str(home_faults.explain_removed_home(str(error)) or _with_home(str(error)))
        case OSError():
            return _with_home(str(error))
        case SQLAlchemyError():
            message = f"a database refuses: {' '.join(str(getattr(error, 'orig', error)).split())}"
            return str(home_faults.explain(message) or _with_home(message))
    return str(error)


def print_error(message: str) -> None:
    # Not wrapped: paths stay whole, and piped text keeps its lines.
    user_console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def print_found(
    as_json: bool,
    found: JsonObject,
    shown: Callable[Concatenate[Console, P], None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Print the result of a command on stdout: as JSON, or through `shown` for the user."""
    if as_json:
        print_json(found)
    else:
        shown(results, *args, **kwargs)


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Redirect output to stderr meanwhile, from the user's checks or their child processes."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)


def _with_home(message: str) -> str:
    home = pedigree_home()
    return (
        f"{message}; PEDIGREE_HOME is {home} ({free_bytes(home):,} bytes free); "
        "finished work is kept, and the same command continues from there"
    )
