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

import csv
import hashlib
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, TextIOWrapper
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import DataError
from training.contract.files.local_files import DataFile, check_unchanged, data_suffix, open_data
from training.contract.identity.file_stamps import stamp_of
from training.contract.identity.fingerprint import canonical_json
from training.data.formats.quarantine import (
    LONGEST_ROW,
    Quarantined,
    QuarantineReason,
    Row,
    enormous_row,
    strict_json,
)
from training.data.reading.file_errors import (
    check_encoding,
    check_rows_outside,
    check_separator,
    invalid_byte,
    undecoded_byte,
)

_BATCH_ROWS = 1024
_TEXTS = (".jsonl", ".ndjson", ".json", ".csv")
_DECODER = json.JSONDecoder(parse_int=str)  # so that a number too long to convert fails only its row
_SHOWN_CHARACTERS = 1000  # of a row that is too long to keep
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class ParsedRow:
    """One row. `line` counts from 1. In files without lines it is the row's number.

    `raw` is the text; None for binary files and CSV. With a `problem`, `value` is empty.
    """

    line: int
    value: Row
    raw: str | None = None
    problem: Quarantined | None = None

    def parsed(self) -> "ParsedRow":
        return self

    @property
    def key(self) -> bytes | None:
        """The digest of the row's content; None if it has a problem, or values unknown to JSON."""
        if self.problem is not None:
            return None
        if self.raw is not None:
            return _text_key(self.raw.encode("utf-8", "surrogatepass"))
        try:
            return hashlib.sha256(b"table:" + canonical_json(self.value)).digest()
        except (TypeError, ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """The row as text that any file can hold, for users to read."""
        text = json.dumps(self.value, default=str, ensure_ascii=False) if self.raw is None else self.raw
        return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")

    @property
    def undecoded(self) -> str:
        """A description of the first byte that is not UTF-8; an empty text without one."""
        return undecoded_byte(self.value, self.raw)


@dataclass(frozen=True)
class UnparsedRow:
    """A line of JSON, still to be parsed."""

    line: int
    content: bytes

    def parsed(self) -> ParsedRow:
        """Parse the line strictly."""
        try:
            return parse_row(self.line, self.content.decode())
        except UnicodeDecodeError:
            problem = Quarantined(QuarantineReason.BAD_UNICODE, invalid_byte(self.content, "the line"))
            return ParsedRow(self.line, {}, self.content.decode(errors="backslashreplace"), problem)

    @property
    def key(self) -> bytes:
        """The digest of the line."""
        return _text_key(self.content)


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


def parse_row(line: int, text: str) -> ParsedRow:
    """Parse one JSON object strictly: without duplicate keys, NaN, or nesting beyond the parser's limit."""
    if len(text) > LONGEST_ROW:
        return ParsedRow(line, {}, text[:_SHOWN_CHARACTERS], enormous_row(len(text), "characters"))
    try:
        value = strict_json(text)
    except Quarantined as problem:
        return ParsedRow(line, {}, text, problem)
    except RecursionError:
        return ParsedRow(line, {}, text, Quarantined(QuarantineReason.BAD_JSON, "nested too deeply"))
    except ValueError as error:
        return ParsedRow(line, {}, text, Quarantined(QuarantineReason.BAD_JSON, str(error)))
    if not isinstance(value, dict):
        return ParsedRow(
            line, {}, text, Quarantined(QuarantineReason.NOT_AN_OBJECT, f"the row is {type(value).__name__}")
        )
    return ParsedRow(line, value, text)


def _read_lines(path: Path) -> Iterator[ParsedRow | UnparsedRow]:
    with open_data(path) as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST_ROW + 1), b""), start=1):
            if len(line) > LONGEST_ROW:
                size = len(line) + _skip_line(file, line)
                start = line[:_SHOWN_CHARACTERS].decode(errors="backslashreplace")
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


def _read_json(path: Path) -> Iterator[ParsedRow | UnparsedRow]:
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
        yield from _read_lines(path)
        return
    record = parse_row(1, sole)
    check_rows_outside(path, record.value)
    yield from [record] if "\n" in sole else _read_lines(path)


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


def _read_table(
    kind: str, batches: Callable[[BufferedReader], Iterator[pa.RecordBatch]], path: Path
) -> Iterator[ParsedRow]:
    number = 0
    try:
        with open_data(path) as file:
            for batch in batches(file):
                batch.validate(full=True)  # a corrupt batch could crash the process
                _check_unique_columns(path, batch.schema.names)
                for value in batch.to_pylist():
                    number += 1
                    yield ParsedRow(number, value)
    except (pa.ArrowException, UnicodeDecodeError, OverflowError) as error:  # the last: a date beyond Python's
        raise DataError(
            f"{path} cannot be read as {kind} after row {number}: {error}; write it again", "unreadable-table"
        ) from error
    except MemoryError as error:  # mostly because a corrupt file states a huge length
        raise DataError(
            f"{path} cannot be read as {kind} after row {number}: the next rows do not fit into memory; write it again",
            "unreadable-table",
        ) from error


def _parquet_batches(file: BufferedReader) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as table:
        yield from table.iter_batches(batch_size=_BATCH_ROWS)


def _read_csv(path: Path) -> Iterator[ParsedRow]:
    """Yield the rows with the line of the file on which they begin: cells may span several lines."""
    csv.field_size_limit(sys.maxsize)
    last_line = 0
    with TextIOWrapper(open_data(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len(header) == 1:
                check_separator(path)
            _check_unique_columns(path, header)
            last_line = reader.line_num
            for cells in reader:
                if cells:
                    yield _csv_record(last_line + 1, header, cells)
                last_line = reader.line_num
        except csv.Error as error:
            if last_line == 0:  # quoted column names with another separator
                check_separator(path)
            raise DataError(
                f"{path} is not CSV after line {last_line}: {error}; quote its fields", "invalid-csv"
            ) from error


def _check_unique_columns(path: Path, columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        [(repeated, _)] = Counter(columns).most_common(1)
        raise DataError(
            f"{path} has two columns `{repeated}`, expected unique names: rename or drop one", "duplicate-column"
        )


def _csv_record(line: int, header: list[str], cells: list[str]) -> ParsedRow:
    if (count := sum(map(len, cells))) > LONGEST_ROW:
        return ParsedRow(line, {}, "".join(cells)[:_SHOWN_CHARACTERS], enormous_row(count, "characters"))
    if len(cells) == len(header):
        return ParsedRow(line, dict(zip(header, cells, strict=True)))
    problem = Quarantined(QuarantineReason.MISSING_FIELD, f"{len(cells)} cells in the row, {len(header)} in the header")
    return ParsedRow(line, {}, json.dumps(cells, ensure_ascii=False), problem)


_READERS: dict[str, Callable[[Path], Iterator[ParsedRow | UnparsedRow]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".parquet": partial(_read_table, "Parquet", _parquet_batches),
    ".arrow": partial(_read_table, "Arrow", pa.ipc.open_stream),
    ".csv": _read_csv,
}


def _text_key(content: bytes) -> bytes:
    return hashlib.sha256(b"text:" + content).digest()


def _skip_blank(text: str, position: int) -> int:
    blank = _BLANK.match(text, position)
    assert blank is not None
    return blank.end()
