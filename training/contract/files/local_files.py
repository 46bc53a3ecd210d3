"""The local files of a recipe, in name order: one listing for hashing them and for reading them.

The list with its hashes is passed to the job, which compares each file again after reading it. So a file that changes,
appears or disappears in between never becomes part of an artifact whose key says otherwise.
"""

import glob
import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path, PurePath

from training.contract.config.fields import StrictModel
from training.contract.errors import DataError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.file_stamps import Stamp, same_content, stamp_of
from training.contract.identity.fingerprint import check_text, short

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv")
COMPRESSED = ".gz"
_NUMBER_OF_NAMES = 5


class DataFile(StrictModel):
    """A file of a source: `name` is its path below the folder or glob it came from; `sha256` None until it is hashed."""

    name: str
    path: Path
    sha256: str | None = None


def data_files(path: str) -> list[DataFile]:
    """The files behind `path`, a file, a folder (its files of known kinds, none hidden) or a glob, sorted by path.

    Of a folder that `datasets` saved to disk, the files its state names, in that order.

    Raises DataError where there is nothing, or a file of a kind that is not read; UsageError where a name is not text.
    """
    found = _found(path)
    for file in found:
        check_text(file.path)
    return found


def _found(path: str) -> list[DataFile]:
    place = Path(path)
    if place.is_file():
        return [_readable(place.name, place)]
    if place.is_dir():
        return _folder_files(place)
    folder = next(parent for parent in place.parents if parent.is_dir())  # whose own name may hold brackets
    pattern = str(place.relative_to(folder))
    for above in reversed(PurePath(pattern).parents):
        for name in glob.glob(str(above), root_dir=folder, recursive=True):
            _check_listable(folder / name)
    found = (folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True))
    matches = sorted(path for path in found if path.is_file())
    if not matches:
        absent = "matches no file" if glob.has_magic(pattern) else "does not exist"
        wanted = "is no regular file" if place.exists() else absent
        raise DataError(f"{path} {wanted}; expected a file, a folder or a glob, beside the recipe")
    return [_readable(match.relative_to(folder).as_posix(), match) for match in matches]


def distinct_names(files: Sequence[DataFile]) -> list[str]:
    """What rows call the files of all sources, in their order: names that several share begin with their numbers."""
    shared = Counter(file.name for file in files)
    return [f"{n}:{file.name}" if shared[file.name] > 1 else file.name for n, file in enumerate(files, 1)]


def data_suffix(path: PurePath) -> str:
    """The extension that says how a data file is read; of a .gz the one before it."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix == COMPRESSED else suffix


def data_format(path: PurePath) -> str:
    """What the name says of how a data file is read: another one makes other rows of the same bytes."""
    return data_suffix(path) + (COMPRESSED if path.suffix.lower() == COMPRESSED else "")


def open_data(path: Path) -> BufferedReader:
    """The bytes of a data file, decompressed if it is a .gz."""
    return BufferedReader(gzip.open(path)) if path.suffix.lower() == COMPRESSED else open(path, "rb")


def is_readable(path: PurePath) -> bool:
    return data_suffix(path) in SUFFIXES


def check_unchanged(path: Path, sha256: str, before: Stamp | None = None) -> None:
    """Raise DataError unless `path`, which was just read, still has this `sha256`.

    `before` is its stamp from before it was read: with it, a file that was another only in between is refused as well.
    """
    try:
        now = hash_file(path)
    except OSError as error:
        raise DataError(f"{path} changed while it was read: {error.strerror or error}; run again") from error
    if now != sha256:
        raise DataError(
            f"{path} changed while it was read: it was {short(sha256)} and is {short(now)}; run again once it is written"
        )
    if before is not None and not same_content(before, stamp_of(path)):
        raise DataError(
            f"{path} changed while it was read: it is again what it was, but somebody wrote to it; run again once it is written"
        )


def _folder_files(folder: Path) -> list[DataFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(f"{folder.name}/{each.parent.name}" for each in folder.glob("*/state.json"))
        raise DataError(f"{folder} is a DatasetDict that was saved to disk; name one split of it: {', '.join(splits)}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_files(folder)
    places = [(path.relative_to(folder), path) for path in (folder, *sorted(folder.rglob("*")))]
    shown = [(name, path) for name, path in places if not any(part.startswith(".") for part in name.parts)]
    for _, path in shown:
        _check_listable(path)
    files = [DataFile(name=name.as_posix(), path=path) for name, path in shown if is_readable(path) and path.is_file()]
    if not files:
        found = [str(name) for name, path in places if path.is_file()]
        seen = ", ".join(found[:_NUMBER_OF_NAMES]) or "nothing"
        raise DataError(f"the folder {folder} has no file of the kinds {', '.join(SUFFIXES)}; it holds {seen}")
    return files


def _check_listable(place: Path) -> None:
    """Raises DataError where a folder, or what a link leads to, may not be looked into: a glob leaves it out without a word."""
    if place.name == "lost+found":  # the file system's own
        return
    try:
        if not place.is_dir():
            return
        with os.scandir(place) as entries:
            if (first := next(entries, None)) is not None:
                first.stat(follow_symlinks=False)
    except OSError as error:
        raise DataError(
            f"{place} cannot be read: {error.strerror}; let this user read it, or move it elsewhere"
        ) from error


def _saved_files(folder: Path) -> list[DataFile]:
    """The files of a data set that `datasets` saved to disk, as its state names them: caches lie beside them."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        return [_readable(name, folder / name) for name in names]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder / 'state.json'} is not what `save_to_disk` writes: {error!r}; save it again"
        ) from error


def _readable(name: str, path: Path) -> DataFile:
    if not is_readable(path):
        known = ", ".join(SUFFIXES)
        raise DataError(
            f"{path} has the extension {path.suffix or 'none'!r}; expected one of {known}, plain or with .gz"
        )
    return DataFile(name=name, path=path)
