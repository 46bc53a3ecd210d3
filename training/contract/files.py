"""Which local files a recipe's `path` stands for: a file, a glob, or every data file of a folder, in name order."""

import glob
from pathlib import Path

from training.contract.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def data_files(path: str) -> list[Path]:
    """The files behind `path`, sorted by name so that rows have one order on every machine.

    Raises DataError where there is nothing, or a file of a kind that is not read.
    """
    place = Path(path)
    if place.is_dir():
        found = sorted(p for p in place.rglob("*") if p.is_file() and p.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"the folder {place} holds no data file; expected {', '.join(SUFFIXES)}")
        return found
    if place.is_file():
        return [_readable(place)]
    found = sorted(Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"there is no file {path}; `data.sources[].path` is a file, a glob or a folder")
    return [_readable(p) for p in found]


def _readable(path: Path) -> Path:
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} ends in {path.suffix or 'nothing'!r}; expected one of {', '.join(SUFFIXES)}")
    return path
