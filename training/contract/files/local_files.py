"""The local files of a recipe, in name order: one list for hashing and for reading.

The job gets the list with the hashes, and compares each file again after reading it. So no file can change, appear or
disappear in between without an error.
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
    """A file of a source. `name` is its path below the folder or glob; `sha256` is None until it is hashed."""

    name: str
    path: Path
    sha256: str | None = None


def data_files(path: str) -> list[DataFile]:
    """Return the files of `path`, a file, a folder or a glob, sorted by path.

    A folder gives its visible files of known kinds. A folder written by `save_to_disk` of `datasets` gives the files of its
    state, in that order. Raises DataError without files or with an unknown extension, UsageError if a name is not text.
    """
    files = _list_files(Path(path))
    for file in files:
        check_text(file.path)
    return files


def _list_files(path: Path) -> list[DataFile]:
    if path.is_file():
        return [_data_file(path.name, path)]
    if path.is_dir():
        return _list_folder(path)
    folder = next(
        parent for parent in path.parents if parent.is_dir()
    )  # its name may hold brackets, which glob nothing
    pattern = str(path.relative_to(folder))
    for parent in reversed(PurePath(pattern).parents):
        for name in glob.glob(str(parent), root_dir=folder, recursive=True):
            _check_listable(folder / name)
    matches = (folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True))
    files = sorted(match for match in matches if match.is_file())
    if not files:
        absent = "matches no file" if glob.has_magic(pattern) else "does not exist"
        problem = "is not a regular file" if path.exists() else absent
        raise DataError(f"{path} {problem}; expected a file, a folder or a glob, beside the recipe", "no-files")
    return [_data_file(file.relative_to(folder).as_posix(), file) for file in files]


def distinct_names(files: Sequence[DataFile]) -> list[str]:
    """Return unique names for the files of all sources, in order: a shared name gets the file's number in front."""
    shared = Counter(file.name for file in files)
    return [f"{n}:{file.name}" if shared[file.name] > 1 else file.name for n, file in enumerate(files, 1)]


def data_suffix(path: PurePath) -> str:
    """Return the extension, which decides how a data file is read; for a .gz, the extension before it."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix == COMPRESSED else suffix


def data_format(path: PurePath) -> str:
    """Return the extension with `.gz`: another one gives other rows for the same bytes."""
    return data_suffix(path) + (COMPRESSED if path.suffix.lower() == COMPRESSED else "")


def open_data(path: Path) -> BufferedReader:
    """Open a data file for reading bytes; decompress a .gz."""
    return BufferedReader(gzip.open(path)) if path.suffix.lower() == COMPRESSED else open(path, "rb")


def is_readable(path: PurePath) -> bool:
    return data_suffix(path) in SUFFIXES


def check_unchanged(path: Path, sha256: str, before: Stamp | None = None) -> None:
    """Raise DataError unless `path`, after reading it, still has this `sha256`.

    `before` is its stamp before the reading. It shows changes even if the content is the same again.
    """
    try:
        current = hash_file(path)
    except OSError as error:
        raise DataError(
            f"{path} changed while it was read: {error.strerror or error}; run again", "file-changed"
        ) from error
    if current != sha256:
        raise DataError(
            f"{path} changed while it was read: it was {short(sha256)} and is {short(current)}; "
            "run again once it is written",
            "file-changed",
        )
    if before is not None and not same_content(before, stamp_of(path)):
        raise DataError(
            f"{path} changed while it was read: its content is the same again, but it was written to; "
            "run again once it is written",
            "file-changed",
        )


def _list_folder(folder: Path) -> list[DataFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(f"{folder.name}/{state.parent.name}" for state in folder.glob("*/state.json"))
        raise DataError(f"{folder} is a saved DatasetDict; name one split of it: {', '.join(splits)}", "dataset-dict")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _list_saved_data_set(folder)
    entries = [(path.relative_to(folder), path) for path in (folder, *sorted(folder.rglob("*")))]
    visible = [(name, path) for name, path in entries if not any(part.startswith(".") for part in name.parts)]
    for _, path in visible:
        _check_listable(path)
    files = [
        DataFile(name=name.as_posix(), path=path) for name, path in visible if is_readable(path) and path.is_file()
    ]
    if not files:
        names = [str(name) for name, path in entries if path.is_file()]
        content = ", ".join(names[:_NUMBER_OF_NAMES]) or "nothing"
        raise DataError(
            f"the folder {folder} has no file of the kinds {', '.join(SUFFIXES)}; it holds {content}", "no-data-files"
        )
    return files


def _check_listable(path: Path) -> None:
    """Raise DataError if a folder, or the target of a link, is unreadable: a glob would silently skip it."""
    if path.name == "lost+found":  # a folder of the file system
        return
    try:
        if not path.is_dir():
            return
        with os.scandir(path) as entries:
            if (first := next(entries, None)) is not None:
                first.stat(follow_symlinks=False)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; let this user read it, or move it elsewhere", "unreadable-file"
        ) from error


def _list_saved_data_set(folder: Path) -> list[DataFile]:
    """Return the files in the state of a data set saved by `datasets`, without the caches beside them."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        return [_data_file(name, folder / name) for name in names]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder / 'state.json'} is not in the format of `save_to_disk`: {error!r}; save it again",
            "bad-dataset-state",
        ) from error


def _data_file(name: str, path: Path) -> DataFile:
    if not is_readable(path):
        known = ", ".join(SUFFIXES)
        raise DataError(
            f"{path} has the extension {path.suffix or 'none'!r}; expected one of {known}, plain or with .gz",
            "unknown-extension",
        )
    return DataFile(name=name, path=path)
