"""Stamps: metadata of a file, which show changes without reading it.

A stamp holds device, inode, size, modification time and change time, the times in nanoseconds. Programs cannot set the change
time. So every edit changes the stamp, except within the same tick of the filesystem's clock. A stamp is only trusted if the
file was older than a tick when the stamp was taken (details: training.contract.identity.hash_cache).
"""

import time
from collections.abc import Iterable
from pathlib import Path

SETTLE_SECONDS = 2.0  # longer than a tick of the coarsest clock of a filesystem
Stamp = tuple[int, int, int, int, int]
Stamps = dict[str, Stamp]  # by the file's name in its folder

_MODEL_FILES = ("*.safetensors", "*.json")  # weights, their index, configs


def stamp_of(file: Path) -> Stamp | None:
    """Return the stamp of a file, or of a link's target; None if it cannot be read."""
    try:
        return take_stamp(file)
    except OSError:
        return None


def take_stamp(file: Path) -> Stamp:
    """Return the stamp of a file, or of a link's target. Raises OSError."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def artifact_stamps(folder: Path) -> Stamps:
    """Return the stamps of all files of an artifact."""
    return _take_stamps(folder, (path for path in folder.rglob("*") if not path.is_dir()))


def model_stamps(folder: Path) -> Stamps:
    """Return the stamps of a model's weights and configs, not of other files beside them."""
    return _take_stamps(folder, (path for pattern in _MODEL_FILES for path in folder.glob(pattern)))


def settled(stamps: Stamps, settle_seconds: float = SETTLE_SECONDS) -> Stamps:
    """Return the stamps of files without recent changes: any later change gives them another stamp."""
    latest = time.time_ns() - int(settle_seconds * 1e9)
    return {name: stamp for name, stamp in stamps.items() if max(stamp[3:]) <= latest}


def same_content(one: Stamp | None, other: Stamp | None) -> bool:
    """Return whether the file was not written or replaced in between; permissions and links may differ."""
    return one is not None and other is not None and one[:4] == other[:4]


def _take_stamps(folder: Path, files: Iterable[Path]) -> Stamps:
    stamps = {file.relative_to(folder).as_posix(): stamp_of(file) for file in sorted(files)}
    return {name: stamp for name, stamp in stamps.items() if stamp is not None}
