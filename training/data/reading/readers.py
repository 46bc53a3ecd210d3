"""Read rows from files, with their lines. A row that cannot be parsed has a problem instead of a value.

    .jsonl  .ndjson   one JSON object per line; bytes are split at "\\n" only, since U+2028 is content
    .json             a list of objects (or JSON lines, as in many published files)
    .parquet          one row per record
    .arrow            the same, as `datasets` saves it to disk
    .csv              a header, then one row per record; every value is text
    .gz               one of these, compressed

`data_files` lists the files of a path, `hub_files` the files of a data set of the Hub. After reading, a file's sha256 is
compared with the listed one.
"""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from training.contract.errors import DataError
from training.contract.files.local_files import DataFile, check_unchanged, data_suffix
from training.contract.identity.file_stamps import stamp_of
from training.data.reading.file_errors import check_encoding
from training.data.reading.json_reader import read_json, read_lines
from training.data.reading.rows import ParsedRow, UnparsedRow
from training.data.reading.table_reader import read_arrow, read_csv, read_parquet

_TEXTS = (".jsonl", ".ndjson", ".json", ".csv")
_READERS: dict[str, Callable[[Path], Iterator[ParsedRow | UnparsedRow]]] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".csv": read_csv,
}


def read_records(file: DataFile) -> Iterator[ParsedRow]:
    """Yield the parsed rows of a file. Raises DataError like `read_rows`."""
    return (row.parsed() for row in read_rows(file))


def read_rows(file: DataFile) -> Iterator[ParsedRow | UnparsedRow]:
    """Yield the rows of a file. Raise DataError if it cannot be read, or, at the end, if its sha256 is not the listed one."""
    suffix, stamp = data_suffix(file.path), stamp_of(file.path)
    try:
        if suffix in _TEXTS:
            check_encoding(file.path)
        yield from _READERS[suffix](file.path)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a .gz that is truncated or corrupt
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{file.path} cannot be read: {reason}; check the file and its permissions", "unreadable-file"
        ) from error
    if file.sha256 is not None:
        check_unchanged(file.path, file.sha256, stamp)
