"""The source of this package as it lies on this machine: what a version number does not pin while it is worked on."""

import functools
from pathlib import Path

from training.contract.fingerprint import fingerprint_of_stream


@functools.cache
def source_digest(package: Path = Path(__file__).parents[1]) -> str:
    """sha256 over the names and bytes of the package's source files, in the order of their names."""
    files = sorted((path.relative_to(package).as_posix(), path) for path in package.rglob("*.py"))
    return fingerprint_of_stream(
        "source", (part for name, path in files for part in (name.encode(), path.read_bytes()))
    )
