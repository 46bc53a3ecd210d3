"""Stamps: what the file system says of a file, by which a change is seen without reading it.

A stamp has device, inode, size, modification time and change time, the times in nanoseconds. No program can choose the change
time, so every edit gives another stamp, unless it falls into the same tick of the file system's clock. So a stamp vouches
for contents only if the file was a while old when the stamp was taken (training.contract.identity.hash_cache says more).
"""

import time
from collections.abc import Iterable
from pathlib import Path

SETTLE_SECONDS = 2.0  # covers the coarsest clock of a file system
Stamp = tuple[int, int, int, int, int]
Stamps = dict[str, Stamp]  # by the file's name in its folder

# What is read of a model: its weights, their index, its configs.
_OF_A_MODEL = ("*.safetensors", "*.json")


def stamp_of(file: Path) -> Stamp | None:
    """The stamp of a file, or of what a link leads to; None if there is none."""
    try:
        return take_stamp(file)
    except OSError:
        return None


def take_stamp(file: Path) -> Stamp:
    """The stamp of a file, or of what a link leads to. Raises OSError."""
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def artifact_stamps(folder: Path) -> Stamps:
    """Those of all files of an artifact."""
    return _stamps(folder, (path for path in folder.rglob("*") if not path.is_dir()))


def model_stamps(folder: Path) -> Stamps:
    """Those of the files that are read of a model; others may lie beside them."""
    return _stamps(folder, (path for pattern in _OF_A_MODEL for path in folder.glob(pattern)))


def settled(stamps: Stamps, settle_seconds: float = SETTLE_SECONDS) -> Stamps:
    """Those of files that have not changed lately: any later change gives them another one."""
    latest = time.time_ns() - int(settle_seconds * 1e9)
    return {name: stamp for name, stamp in stamps.items() if max(stamp[3:]) <= latest}


def same_content(one: Stamp | None, other: Stamp | None) -> bool:
    """Whether nobody wrote or replaced the file in between: at most its permissions or its links changed."""
    return one is not None and other is not None and one[:4] == other[:4]


def _stamps(folder: Path, files: Iterable[Path]) -> Stamps:
    found = {file.relative_to(folder).as_posix(): stamp_of(file) for file in sorted(files)}
    return {name: stamp for name, stamp in found.items() if stamp is not None}
