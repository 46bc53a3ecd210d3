"""Which software runs here: the versions of Python and the libraries, and the source of this package itself.

A release of a library may have a bug that the next one mends. So the versions of the libraries that make tokens and log-probs
are settings of these artifacts, under the name `SOFTWARE`. Under other versions a job compares a sample of what was made
before with what it gives now, and only if they differ makes all of it again.
"""

import contextlib
import functools
import importlib.metadata
import platform
from pathlib import Path

from training.contract.config.recipe import DeviceName
from training.contract.identity.fingerprint import fingerprint_of_stream
from training.contract.system.cgroups import accelerator

SOFTWARE = "software"  # the setting
COMPARED = 64  # how many rows, or sequences, such a sample has
_LIBRARIES = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "pyarrow", "numpy", "pedigree")
_OF_TOKENS = ("transformers", "tokenizers", "jinja2")
_OF_LOGPROBS = ("torch", "transformers")


@functools.cache
def library_versions() -> dict[str, str]:
    """The versions of Python and of the libraries a result depends on, of those that are installed."""
    return {"python": platform.python_version()} | _versions(_LIBRARIES)


def token_software() -> dict[str, str]:
    """Return the versions of what makes tokens of text."""
    return _versions(_OF_TOKENS)


def scoring_software(device: DeviceName) -> dict[str, str]:
    """Return the versions of what makes log-probs, and the `device`: the name of the GPU, or `cpu`."""
    return _versions(_OF_LOGPROBS) | {"device": accelerator(device)}


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = _version(name)
    return found


@functools.cache
def _version(name: str) -> str:
    return importlib.metadata.version(name)


@functools.cache
def source_digest(package: Path = Path(__file__).parents[2]) -> str:
    """sha256 over the names and bytes of the package's source files, in the order of their names.

    It identifies code that is being worked on, between two released versions.
    """
    files = sorted((path.relative_to(package).as_posix(), path) for path in package.rglob("*.py"))
    return fingerprint_of_stream(
        "source", (part for name, path in files for part in (name.encode(), path.read_bytes()))
    )
