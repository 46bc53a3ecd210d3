"""A released version behind an OpenAI-compatible address, for `pedigree serve` and `pedigree chat`.

Two processes run. `transformers serve` holds the model, on a port of loopback that nobody is told. Clients talk to the proxy in
front of it (model_registry/chat_proxy.py).
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_registry.model_version import Version
from model_registry.proxy_settings import ProxySettings
from model_registry.registry import Registry
from training.contract.errors import ModelError, PedigreeError
from training.contract.identity.json_objects import read_object
from training.contract.identity.tokenizer_files import CHAT_TEMPLATES, holds_tokenizer
from workflows.servers.web_servers import LOOPBACK, Server, free_port, serving, usable_port

_NEEDED = ("accelerate", "fastapi", "openai")
_LOADING_SECONDS = 1800.0  # of tens of gigabytes from a slow disk
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # a server that listens everywhere is asked on loopback


def named_version(text: str, registry: Registry) -> Version:
    """The version that `NAME`, its champion, or `NAME@ALIAS` or `NAME/NUMBER` stands for. Raises RegistryError."""
    name = text.removeprefix("models:/")
    return registry.version_at(f"models:/{name}" if "@" in name or "/" in name else f"models:/{name}@champion")


@contextmanager
def model_server(
    version: Version, folder: Path, logs: Path, host: str, port: int, tell: Callable[[str], None]
) -> Iterator[str]:
    """Serve the version whose Hugging Face model is in `folder`; gives the address. Raises PedigreeError, ModelError."""
    _check_extra_installed()
    _check_chat_template(version, folder)
    chosen = usable_port(port, tell, host) if port else free_port(0, host)
    behind = _transformers_server(folder, logs)
    proxy = ProxySettings(version.name, f"./{folder.name}", behind.address, host, chosen, _generation(folder))
    front = _proxy_server(proxy, logs)
    tell(f"Loading version {version.number} of {version.name}.")
    with serving([behind, front]):
        yield front.address


def _transformers_server(folder: Path, logs: Path) -> Server:
    port = free_port(0)
    # Named from where it lies: in a longer name, `@` would begin a revision.
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", f"./{folder.name}"]
    command += ["--host", LOOPBACK, "--port", str(port)]
    address = f"http://{LOOPBACK}:{port}"
    offline = {"HF_HUB_OFFLINE": "1"}
    log = logs / "transformers.log"
    return Server(
        "transformers serve", command, address, f"{address}/health", log, offline, folder.parent, _LOADING_SECONDS
    )


def _proxy_server(proxy: ProxySettings, logs: Path) -> Server:
    command = [sys.executable, "-m", "model_registry.chat_proxy", str(proxy)]
    host = _ANY.get(proxy.host, proxy.host)
    address = f"http://[{host}]:{proxy.port}" if ":" in host else f"http://{host}:{proxy.port}"
    return Server("The model's proxy", command, address, f"{address}/health", logs / "proxy.log")


def _check_extra_installed() -> None:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise PedigreeError(
            f"serving needs {', '.join(missing)}, not installed in {sys.prefix}; install Pedigree with its extra `serve`: "
            "pip install 'pedigree[serve]', or in a clone pip install --editable '.[serve]' --constraint constraints.txt"
        )


def _check_chat_template(version: Version, folder: Path) -> None:
    """Raises ModelError if no chat could become tokens."""
    about = f"version {version.number} of {version.name}"
    if not holds_tokenizer(folder):
        raise ModelError(
            f"{about} has no tokenizer in {folder}; expected files such as tokenizer.json there. If a recipe released it, "
            "move that folder away and run the recipe, which puts it back; else register the model again with its tokenizer"
        )
    if not _holds_template(folder):
        raise ModelError(
            f"{about} has no chat template in {folder}; expected chat_template.jinja or a `chat_template` in "
            "tokenizer_config.json. Name one as `tokenization.chat_template` of the recipe and run it again"
        )


def _holds_template(folder: Path) -> bool:
    if any(path.is_file() for pattern in CHAT_TEMPLATES for path in folder.glob(pattern)):
        return True
    return bool(_json_object(folder / "tokenizer_config.json").get("chat_template"))


def _generation(folder: Path) -> dict[str, Any]:
    return _json_object(folder / "generation_config.json")


def _json_object(path: Path) -> dict[str, Any]:
    """What is in a JSON file; nothing if there is none. Raises ModelError."""
    return read_object(path, "settings of a model") if path.is_file() else {}
