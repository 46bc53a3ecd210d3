"""The software of this process: the versions of Python and the libraries, and the source of this package.

A library's release may have a bug, which a later release fixes. So the versions of the libraries behind tokens and log-probs
are settings of these artifacts, under the name `SOFTWARE`. Under other versions a job computes a sample again. Only if it
differs from the stored one, the job recomputes all.
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
# The version of the scoring algorithm (training.model). A new version makes all cached log-probs unused.
SCORING_VERSION = "shared-prefix-1"
COMPARED = 64  # rows, or sequences, in the sample
_LIBRARIES = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "pyarrow", "numpy", "pedigree")
_OF_TOKENS = ("transformers", "tokenizers", "jinja2")
_OF_LOGPROBS = ("torch", "transformers")


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries with an effect on results."""
    return {"python": platform.python_version()} | _versions(_LIBRARIES)


def token_software() -> dict[str, str]:
    """Return the versions of the libraries behind tokens."""
    return _versions(_OF_TOKENS)


def scoring_software(device: DeviceName) -> dict[str, str]:
    """Return the versions of the libraries behind log-probs, and the `device`: the name of the GPU, or `cpu`."""
    return _versions(_OF_LOGPROBS) | {"device": accelerator(device)}


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = _version(name)
    return versions


@functools.cache
def _version(name: str) -> str:
    return importlib.metadata.version(name)


@functools.cache
def source_digest(package: Path = Path(__file__).parents[2]) -> str:
    """Return the sha256 over the names and bytes of the package's source files, sorted by name.

    It identifies code in development, between two released versions.
    """
    sources = [*package.rglob("*.py"), *package.rglob("*.j2")]
    files = sorted((path.relative_to(package).as_posix(), path) for path in sources)
    return fingerprint_of_stream(
        "source", (part for name, path in files for part in (name.encode(), path.read_bytes()))
    )
