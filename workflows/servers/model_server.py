"""A released version behind an OpenAI-compatible address, for `pedigree serve` and `pedigree chat`.

Two processes run. `transformers serve` holds the model, on an internal port of loopback. Clients talk to the proxy in front of
it (chat_proxy.py).
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from model_registry.model_version import Version
from model_registry.registry import Registry
from training.contract.config.json_object import JsonObject
from training.contract.errors import ModelError, PedigreeError
from training.contract.identity.json_objects import read_object
from training.contract.identity.tokenizer_files import CHAT_TEMPLATES, holds_tokenizer
from workflows.servers.proxy_settings import ProxySettings
from workflows.servers.server_processes import LOOPBACK, Processes, Server, free_port, serving, usable_port

_NEEDED = ("accelerate", "fastapi", "openai")
_LOADING_SECONDS = 1800.0  # for tens of gigabytes from a slow disk
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # probe a server on all addresses through loopback


def named_version(text: str, registry: Registry) -> Version:
    """Return the version for `NAME` (its champion), `NAME@ALIAS` or `NAME/NUMBER`. Raises RegistryError."""
    name = text.removeprefix("models:/")
    return registry.version_at(f"models:/{name}" if "@" in name or "/" in name else f"models:/{name}@champion")


@contextmanager
def model_server(
    version: Version, folder: Path, logs: Path, host: str, port: int, report: Callable[[str], None]
) -> Iterator[tuple[str, Processes]]:
    """Serve the version with its Hugging Face model in `folder`. Yield the address and the processes.

    Raises PedigreeError, ModelError.
    """
    _check_extra_installed()
    _check_chat_template(version, folder)
    proxy_port = usable_port(port, report, host) if port else free_port(0, host)
    upstream = _transformers_server(folder, logs)
    proxy = ProxySettings(version.name, f"./{folder.name}", upstream.address, host, proxy_port, _generation(folder))
    server = _proxy_server(proxy, logs)
    report(f"Loading version {version.number} of {version.name}.")
    with serving([upstream, server], report) as processes:
        yield server.address, processes


def _transformers_server(folder: Path, logs: Path) -> Server:
    port = free_port(0)
    # A relative path: in a longer one, `@` would begin a revision.
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", f"./{folder.name}"]
    command += ["--host", LOOPBACK, "--port", str(port)]
    address = f"http://{LOOPBACK}:{port}"
    offline = {"HF_HUB_OFFLINE": "1"}
    log = logs / "transformers.log"
    return Server(
        "transformers serve", command, address, f"{address}/health", log, offline, folder.parent, _LOADING_SECONDS
    )


def _proxy_server(proxy: ProxySettings, logs: Path) -> Server:
    command = [sys.executable, "-m", "workflows.servers.chat_proxy", str(proxy)]
    host = _ANY.get(proxy.host, proxy.host)
    address = f"http://[{host}]:{proxy.port}" if ":" in host else f"http://{host}:{proxy.port}"
    return Server("The model's proxy", command, address, f"{address}/health", logs / "proxy.log")


def _check_extra_installed() -> None:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise PedigreeError(
            f"serving needs {', '.join(missing)}, not installed in {sys.prefix}; install Pedigree with its extra `serve`: "
            "pip install 'pedigree[serve]', or in a clone pip install --editable '.[serve]' --constraint constraints.txt",
            "missing-package",
        )


def _check_chat_template(version: Version, folder: Path) -> None:
    """Raise ModelError if the version cannot turn chats into tokens."""
    name = f"version {version.number} of {version.name}"
    if not holds_tokenizer(folder):
        raise ModelError(
            f"{name} has no tokenizer in {folder}; expected files such as tokenizer.json there. If a recipe released it, "
            "move that folder away and run the recipe to restore it; else register the model again with its tokenizer",
            "missing-tokenizer",
        )
    if not _holds_template(folder):
        raise ModelError(
            f"{name} has no chat template in {folder}; expected chat_template.jinja or a `chat_template` in "
            "tokenizer_config.json. Name one as `tokenization.chat_template` of the recipe and run it again",
            "missing-chat-template",
        )


def _holds_template(folder: Path) -> bool:
    if any(path.is_file() for pattern in CHAT_TEMPLATES for path in folder.glob(pattern)):
        return True
    return bool(_json_object(folder / "tokenizer_config.json").get("chat_template"))


def _generation(folder: Path) -> JsonObject:
    return _json_object(folder / "generation_config.json")


def _json_object(path: Path) -> JsonObject:
    """Return the object in a JSON file, empty if the file is missing. Raises ModelError."""
    return read_object(path, "settings of a model") if path.is_file() else {}
