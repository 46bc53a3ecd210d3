"""Faults of a whole file: another encoding, another separator, or rows inside of an object.

Spreadsheets and scripts export such files. A message about a single row would name a cell, a character or a bracket, but not
the cause, which is the same for every row.
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

# UTF-32 goes first: its mark for little endian begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Which of the first four bytes are zero if a file without a mark begins with ASCII characters.
_ZEROS = {(1, 3): "UTF-16", (0, 2): "UTF-16", (1, 2, 3): "UTF-32", (0, 1, 2): "UTF-32"}
_SEPARATORS = {";": "';'", "\t": "a tab", "|": "'|'"}
_LONGEST_HEADER = 1 << 16
_UNDECODED = re.compile("[\udc80-\udcff]")  # how a byte that is not UTF-8 is kept in text
_SPEAKER_FIELDS = {"role", "from"}


def check_encoding(path: Path) -> None:
    """Raise DataError if the file begins as UTF-16 or UTF-32 does."""
    with open_data(path) as file:
        start = file.read(4)
    advice = "expected UTF-8: save it as UTF-8 (in Excel as `CSV UTF-8`)"
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise DataError(f"{path} begins with a {name} byte order mark, {advice}")
    zeros = tuple(place for place, byte in enumerate(start) if byte == 0)
    if len(start) == 4 and zeros in _ZEROS:
        raise DataError(f"{path} begins with the bytes {start.hex(' ')}, as {_ZEROS[zeros]} does, {advice}")


def check_separator(path: Path) -> None:
    """Raise DataError if another separator than the comma makes several columns of the first line."""
    with TextIOWrapper(open_data(path), encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
        line = file.readline(_LONGEST_HEADER)
    columns = {separator: _cells(line, separator) for separator in _SEPARATORS}
    best = max(columns, key=lambda separator: len(columns[separator]))
    if len(columns[best]) > 1:
        raise DataError(
            f"{path}: found the separator {_SEPARATORS[best]}, expected ','; with it the columns are "
            f"{', '.join(map(repr, columns[best]))}: save the file with commas between them, or as JSON lines or Parquet"
        )


def check_rows_outside(path: Path | str, value: Mapping[str, Any]) -> None:
    """Raise DataError if `value`, the only object of the file, is not a row but holds lists of rows, such as splits."""
    counts = {name: len(held) for name, held in value.items() if _holds_rows(held)}
    if not counts or not value.keys().isdisjoint(get_args(FieldName)):
        return
    fields = " and ".join(f"`{name}` holds a list of {count} rows" for name, count in counts.items())
    files = "save that list" if len(counts) == 1 else "save one of these lists, or each in a file of its own"
    raise DataError(
        f"{path} holds one object, in which {fields}; expected a JSON list of objects: {files}, or write the rows as JSON lines"
    )


def check_names(place: str, row: Mapping[str, Any]) -> None:
    """Raise DataError if the name of a field is not UTF-8."""
    for name in row:
        if _UNDECODED.search(name):
            raise DataError(f"{place}: {invalid_byte(_bytes(name) + b',', 'the name of a column')}")


def invalid_byte(content: bytes, place: str) -> str:
    """Describe the first byte of `content` that is not UTF-8; the empty string if all are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        at = error.start
        looks = ", it looks like cp1252 or Latin-1" if _is_lone_letter(content, at) else ""
        return f"byte 0x{content[at]:02x} at position {at} of {place} is not UTF-8{looks}: save the file as UTF-8"
    return ""


def undecoded_byte(value: Mapping[str, Any], raw: str | None) -> str:
    """Describe the first byte of a row that is not UTF-8; the empty string if all are.

    In CSV it is in a cell, since `raw`, the text of the row, is None.
    """
    if raw is not None:
        return invalid_byte(_bytes(raw), "the row")
    cells = {name: cell for name, cell in value.items() if isinstance(cell, str) and _UNDECODED.search(cell)}
    return next((invalid_byte(_bytes(cell) + b",", f"`{name}`") for name, cell in cells.items()), "")


def _is_lone_letter(content: bytes, at: int) -> bool:
    """Whether cp1252 has a character for a byte that stands between ASCII characters, as a letter with an accent does."""
    neighbours = content[max(0, at - 1) : at] + content[at + 1 : at + 2]
    is_followed = at + 1 < len(content)
    return is_followed and neighbours.isascii() and bool(content[at : at + 1].decode("cp1252", "ignore"))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error:
        return []


def _holds_rows(value: Any) -> bool:
    """Whether `value` is a list of objects that are no messages."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not _SPEAKER_FIELDS & value[0].keys()
    )
