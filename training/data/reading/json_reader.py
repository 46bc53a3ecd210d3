"""Read JSON lines, and JSON lists of objects."""

import json
import re
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

from training.contract.errors import DataError
from training.contract.files.local_files import open_data
from training.data.formats.quarantine import LONGEST_ROW, enormous_row
from training.data.reading.file_errors import check_rows_outside
from training.data.reading.rows import SHOWN_CHARACTERS, ParsedRow, UnparsedRow, parse_row

_DECODER = json.JSONDecoder(parse_int=str)  # so that a number too long to convert fails only its row
_BLANK = re.compile(r"[ \t\r\n]*")


def read_lines(path: Path) -> Iterator[ParsedRow | UnparsedRow]:
    with open_data(path) as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST_ROW + 1), b""), start=1):
            if len(line) > LONGEST_ROW:
                size = len(line) + _skip_line(file, line)
                start = line[:SHOWN_CHARACTERS].decode(errors="backslashreplace")
                yield ParsedRow(number, {}, start, enormous_row(size, "bytes"))
                continue
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield UnparsedRow(number, content.rstrip(b"\r\n"))


def _skip_line(file: BufferedReader, part: bytes) -> int:
    """Read to the end of the line that begins with `part`. Return the number of bytes read."""
    skipped = 0
    while part and not part.endswith(b"\n"):
        part = file.readline(LONGEST_ROW)
        skipped += len(part)
    return skipped


def read_json(path: Path) -> Iterator[ParsedRow | UnparsedRow]:
    """Yield the elements of a JSON list. Bytes that are not UTF-8 become lone surrogates, which `clean_text` rejects."""
    with open_data(path) as file:
        text = file.read().removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
    start = _skip_blank(text, 0)
    if text[start : start + 1] == "{":
        yield from _read_objects(path, text, start)
        return
    if text[start : start + 1] != "[":
        raise DataError(f"{path} begins with {text[start : start + 20]!r}; expected a JSON list of objects", "not-json")
    try:
        for number, element in enumerate(_elements(text, start + 1), start=1):
            yield parse_row(number, element)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not a complete JSON list: {error}; write it again, or use JSON lines", "incomplete-json"
        ) from error


def _read_objects(path: Path, text: str, start: int) -> Iterator[ParsedRow | UnparsedRow]:
    """Yield JSON lines, or the only object, which may span several lines."""
    sole = _sole_object(text, start)
    if sole is None:
        yield from read_lines(path)
        return
    record = parse_row(1, sole)
    check_rows_outside(path, record.value)
    yield from [record] if "\n" in sole else read_lines(path)


def _sole_object(text: str, start: int) -> str | None:
    """Return the text of the object that begins at `start`; None if more text follows."""
    try:
        end = _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None
    return text[start:end] if _skip_blank(text, end) == len(text) else None


def _elements(text: str, position: int) -> Iterator[str]:
    """Yield the text of each element of a list. Its content begins at `position`."""
    position = _skip_blank(text, position)
    while text[position : position + 1] != "]":
        end = _DECODER.raw_decode(text, position)[1]
        yield text[position:end]
        position = _skip_blank(text, end)
        if text[position : position + 1] == ",":
            position = _skip_blank(text, position + 1)
        elif text[position : position + 1] != "]":
            raise json.JSONDecodeError("expecting ',' or ']'", text, position)
    if (end := _skip_blank(text, position + 1)) != len(text):
        raise json.JSONDecodeError("extra data", text, end)


def _skip_blank(text: str, position: int) -> int:
    blank = _BLANK.match(text, position)
    assert blank is not None
    return blank.end()
