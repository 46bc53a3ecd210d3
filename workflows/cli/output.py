"""How a command ends: what it found on stdout, what people read meanwhile on stderr, and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong use, such as a wrong recipe or option. With `--json`, stdout holds one JSON object and
nothing else; where a command failed before it had a result, that object has an `error`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import click
import dagster as dg
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from sqlalchemy.exc import DatabaseError

from assets.execution.interruption import INTERRUPTED
from training.contract.errors import PedigreeError
from training.contract.files.hub import pin_hub_revisions
from training.contract.system.atomic_io import SHARED_HOME_HINT, free_bytes
from workflows.orchestration.resources import pedigree_home

_STDOUT, _STDERR = 1, 2  # as processes inherit them, whatever stands for them in this one
P = ParamSpec("P")

# What a person can act on: our own errors; what the operating system refuses, such as a disk that is full, a folder nobody may
# write to, or a database on either; and Ctrl-C.
REFUSALS = (PedigreeError, OSError, DatabaseError, dg.DagsterExecutionInterruptedError, KeyboardInterrupt)
# Pictures of what would move the cursor, name the window or fill the clipboard; rich itself leaves most of it as it is.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")


class SanitizedConsole(Console):
    """Shows text that comes from data, templates or files, and obeys none of it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_PICTURES))


results = SanitizedConsole(highlight=False)
people = SanitizedConsole(stderr=True, highlight=False)


class JsonGroup(click.Group):
    """Commands whose wrong use, as click tells it on stderr, is an object on stdout too if `--json` is among the words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _told_in_json(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _told_in_json(ctx.args):
            return super().invoke(ctx)


@contextmanager
def _told_in_json(words: Sequence[str]) -> Iterator[None]:
    wants_json = "--json" in words  # before click takes them
    try:
        yield
    except click.UsageError as error:
        if wants_json:
            print_json({"error": error.format_message()})
        raise


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """One of `REFUSALS` ends the command with its message and its exit code, without a traceback.

    All that a command does is of one state of the hub.
    """

    @wraps(command)
    def reported(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with pin_hub_revisions():
                return command(*args, **kwargs)
        except BrokenPipeError:  # whoever reads has seen enough, as in `| head`: click ends quietly
            raise
        except REFUSALS as error:
            message = explained(error)
            code = error.exit_code if isinstance(error, PedigreeError) else PedigreeError.exit_code
        except Exception as error:
            if not isinstance(error.__cause__, DatabaseError):
                raise
            # Dagster's storage in Postgres tries again for a while, and then has an error of its own.
            message, code = explained(error.__cause__), PedigreeError.exit_code
        if kwargs.get("as_json"):
            print_json({"error": message})
        print_error(message)
        sys.exit(code)

    return reported


def explained(error: BaseException) -> str:
    """What a person reads of one of `REFUSALS`."""
    match error:
        case KeyboardInterrupt() | dg.DagsterExecutionInterruptedError():
            return str(error) or INTERRUPTED
        case PermissionError():
            return f"{error}; {SHARED_HOME_HINT}"
        case OSError():
            return _refused(str(error))
        case DatabaseError():
            account = f"a database refuses: {' '.join(str(error.orig).split())}"
            if (foreign := _foreign_database()) is not None:
                return f"{account}: this user may not write {foreign}; {SHARED_HOME_HINT}"
            return _refused(account)
    return str(error)


def print_error(message: str) -> None:
    # Not wrapped: paths stay whole, and what is piped has the lines it was given.
    people.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def print_found(
    as_json: bool,
    found: dict[str, Any],
    shown: Callable[Concatenate[Console, P], None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """What a command has found, on stdout: as JSON, or as `shown` shows its arguments to people."""
    if as_json:
        print_json(found)
    else:
        shown(results, *args, **kwargs)


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """What is printed within, by checks of a person's own or by processes they start, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)


def print_json(value: dict[str, Any]) -> None:
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(value, ensure_ascii=not is_unicode) + "\n")


def _foreign_database() -> Path | None:
    """A database of the home that belongs to another user, or a journal of one: SQLite does not say which it may not write."""
    home = pedigree_home()
    places = (home / "mlflow", Path(os.environ.get("DAGSTER_HOME") or home / "dagster"))
    found = (path for place in places for path in place.rglob("*.db*"))
    return next((path for path in found if not os.access(path, os.W_OK)), None)


def _refused(account: str) -> str:
    home = pedigree_home()
    return (
        f"{account}; PEDIGREE_HOME is {home} ({free_bytes(home):,} bytes free); "
        "what was finished is kept, and the same command goes on from there"
    )
