"""A group of commands that are imported when they are called, and wrong use as a JSON object.

The imports of a command take seconds, and `pedigree --help` needs none of them.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import click

from training.contract.config.json_object import JsonObject
from training.contract.system.imports import import_without_gc


class LazyCommand(NamedTuple):
    """A command: its module, which has it under its own name, and the line about it in the help of the group."""

    module: str
    help: str


class LazyGroup(click.Group):
    """Commands that are imported when they are called.

    They report wrong use on stdout too, as a JSON object, if `--json` is among the arguments. `prepare` is called before the
    first import.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], prepare: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy, self._prepare = lazy, prepare

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (lazy := self._lazy.get(cmd_name)) is None:
            return None
        self._prepare()
        with silent_ctrl_c():
            command: click.Command = getattr(import_without_gc(lazy.module), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name].help) for name in self.list_commands(ctx)])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _usage_errors_in_json(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _usage_errors_in_json(ctx.args):
            return super().invoke(ctx)


@contextmanager
def silent_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process silently: nothing has happened yet. Python's handler would print a traceback."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell's background job ignores the signal
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _usage_errors_in_json(arguments: Sequence[str]) -> Iterator[None]:
    wants_json = "--json" in arguments  # before click removes it
    try:
        yield
    except click.UsageError as error:
        if wants_json:
            print_json({"error": error.format_message()})
        raise


def print_json(value: JsonObject) -> None:
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(value, ensure_ascii=not is_unicode) + "\n")
