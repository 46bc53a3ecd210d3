"""Which software runs here: the versions of Python and the libraries, and the source of this package itself."""

import contextlib
import functools
import importlib.metadata
import platform
from pathlib import Path

from training.contract.fingerprint import fingerprint_of_stream

_LIBRARIES = ("torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "pyarrow", "numpy", "pedigree")


@functools.cache
def library_versions() -> dict[str, str]:
    """The versions of Python and of the libraries a result depends on, of those that are installed."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def source_digest(package: Path = Path(__file__).parents[1]) -> str:
    """sha256 over the names and bytes of the package's source files, in the order of their names.

    It identifies code that is being worked on, between two released versions.
    """
    files = sorted((path.relative_to(package).as_posix(), path) for path in package.rglob("*.py"))
    return fingerprint_of_stream(
        "source", (part for name, path in files for part in (name.encode(), path.read_bytes()))
    )
