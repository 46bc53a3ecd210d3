"""The commands `pedigree serve` and `pedigree chat`: a released version at an address, or in the terminal."""

import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import click

from model_registry.model_version import Version
from model_registry.registry import Registry
from workflows.cli.output import print_error, reporting, results, user_console
from workflows.cli.terminal_chat import Conversation, converse
from workflows.orchestration.resources import build_services, pedigree_home, prepare_home
from workflows.servers.model_server import model_server, named_version
from workflows.servers.server_processes import LOOPBACK

_model = click.argument("model", metavar="MODEL[@ALIAS|/VERSION]")


@click.command()
@_model
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port, if it is free.")
@reporting
def serve(model: str, host: str, port: int) -> None:
    """Serve a released model like OpenAI's chat completions, until Ctrl-C.

    MODEL is a recipe's `release.model_name`, by default its champion. No temperature, or 0, is greedy.
    """
    version, folder = _find_version(model)
    with (
        suppress(KeyboardInterrupt),
        model_server(version, folder, _logs(), host, port, user_console.print) as (address, processes),
    ):
        results.print(f"{version.name}, version {version.number}: {address}/v1/chat/completions", soft_wrap=True)
        processes.watch()


@click.command()
@_model
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 is greedy; above 0 it samples.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Maximum length of an answer."
)
@click.option("--system", metavar="TEXT", help="A system message for the beginning.")
@reporting
def chat(model: str, temperature: float, max_tokens: int, system: str | None) -> None:
    """Talk to a released model: a line is a question. Ctrl-C ends an answer, Ctrl-D the conversation.

    MODEL is a recipe's `release.model_name`, by default its champion.
    """
    version, folder = _find_version(model)
    settings = {"model": version.name, "temperature": temperature, "max_tokens": max_tokens}
    messages = [{"role": "system", "content": system}] if system else []
    with (
        suppress(KeyboardInterrupt),
        model_server(version, folder, _logs(), LOOPBACK, 0, user_console.print) as (address, _),
    ):
        for number in (signal.SIGTERM, signal.SIGHUP):  # unlike Ctrl-C, they end the whole command
            signal.signal(number, _end)
        converse(Conversation(address, settings, messages), _write, print_error)


def _find_version(model: str) -> tuple[Version, Path]:
    prepare_home(pedigree_home())
    registry: Registry = build_services(pedigree_home()).registry
    version = named_version(model, registry)
    return version, registry.folder(version)


def _logs() -> Path:
    return pedigree_home() / "serve"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
