"""Detect errors of a whole file: another encoding, another separator, or rows inside an object.

Spreadsheets and scripts export such files. An error about a single row would hide the common cause.
"""

import codecs
import csv
import re
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any, get_args

from training.contract.config.data_source import FieldName
from training.contract.errors import DataError
from training.contract.files.local_files import open_data

# UTF-32 comes first, since its little-endian mark begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# The zero bytes among the first four, if a file without a mark begins with ASCII characters.
_ZEROS = {(1, 3): "UTF-16", (0, 2): "UTF-16", (1, 2, 3): "UTF-32", (0, 1, 2): "UTF-32"}
_SEPARATORS = {";": "';'", "\t": "a tab", "|": "'|'"}
_LONGEST_HEADER = 1 << 16
_UNDECODED = re.compile("[\udc80-\udcff]")  # `surrogateescape` decodes invalid bytes to these
_SPEAKER_FIELDS = {"role", "from"}


def check_encoding(path: Path) -> None:
    """Raise DataError if the file begins like UTF-16 or UTF-32."""
    with open_data(path) as file:
        start = file.read(4)
    advice = "expected UTF-8: save it as UTF-8 (in Excel as `CSV UTF-8`)"
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise DataError(f"{path} begins with a {name} byte order mark, {advice}", "file-encoding")
    zeros = tuple(index for index, byte in enumerate(start) if byte == 0)
    if len(start) == 4 and zeros in _ZEROS:
        raise DataError(
            f"{path} begins with the bytes {start.hex(' ')}, like {_ZEROS[zeros]}, {advice}", "file-encoding"
        )


def check_separator(path: Path) -> None:
    """Raise DataError if a separator other than the comma splits the first line into columns."""
    with TextIOWrapper(open_data(path), encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
        line = file.readline(_LONGEST_HEADER)
    columns = {separator: _cells(line, separator) for separator in _SEPARATORS}
    best = max(columns, key=lambda separator: len(columns[separator]))
    if len(columns[best]) > 1:
        raise DataError(
            f"{path}: found the separator {_SEPARATORS[best]}, expected ','; with it the columns are "
            f"{', '.join(map(repr, columns[best]))}: save the file with commas, or as JSON lines or Parquet",
            "csv-separator",
        )


def check_rows_outside(path: Path | str, value: Mapping[str, Any]) -> None:
    """Raise DataError if `value`, the only object of the file, holds lists of rows, such as splits, instead of a row."""
    counts = {name: len(rows) for name, rows in value.items() if _holds_rows(rows)}
    if not counts or not value.keys().isdisjoint(get_args(FieldName)):
        return
    fields = " and ".join(f"`{name}` holds a list of {count} rows" for name, count in counts.items())
    files = "save that list" if len(counts) == 1 else "save each list as its own file"
    raise DataError(
        f"{path} holds one object, in which {fields}; expected a JSON list of objects: {files}, or write JSON lines",
        "rows-in-object",
    )


def check_names(file: str, row: Mapping[str, Any]) -> None:
    """Raise DataError if the name of a field is not UTF-8."""
    for name in row:
        if _UNDECODED.search(name):
            byte = invalid_byte(_bytes(name) + b",", "the name of a column")
            raise DataError(f"{file}: {byte}", "column-name-encoding")


def invalid_byte(content: bytes, part: str) -> str:
    """Describe the first byte of `content` that is not UTF-8; an empty text without one. `part` names the content."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        position = error.start
        guess = ", it looks like cp1252 or Latin-1" if _is_lone_letter(content, position) else ""
        return f"byte 0x{content[position]:02x} at position {position} of {part} is not UTF-8{guess}: save the file as UTF-8"
    return ""


def undecoded_byte(value: Mapping[str, Any], raw: str | None) -> str:
    """Describe the first byte of a row that is not UTF-8; an empty text without one.

    CSV rows lack the `raw` text, so their cells are checked.
    """
    if raw is not None:
        return invalid_byte(_bytes(raw), "the row")
    cells = {name: cell for name, cell in value.items() if isinstance(cell, str) and _UNDECODED.search(cell)}
    return next((invalid_byte(_bytes(cell) + b",", f"`{name}`") for name, cell in cells.items()), "")


def _is_lone_letter(content: bytes, position: int) -> bool:
    """Return whether the byte stands between ASCII characters, like an accented letter, and cp1252 has it."""
    neighbours = content[max(0, position - 1) : position] + content[position + 1 : position + 2]
    is_followed = position + 1 < len(content)
    return is_followed and neighbours.isascii() and bool(content[position : position + 1].decode("cp1252", "ignore"))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error:
        return []


def _holds_rows(value: Any) -> bool:
    """Return whether `value` is a list of objects other than messages."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not _SPEAKER_FIELDS & value[0].keys()
    )
