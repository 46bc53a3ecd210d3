"""Read tables: Parquet, Arrow and CSV."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import DataError
from training.contract.files.local_files import open_data
from training.data.formats.quarantine import LONGEST_ROW, Quarantined, QuarantineReason, enormous_row
from training.data.reading.file_errors import check_separator
from training.data.reading.rows import SHOWN_CHARACTERS, ParsedRow

_BATCH_ROWS = 1024


def read_parquet(path: Path) -> Iterator[ParsedRow]:
    return _read_table("Parquet", _parquet_batches, path)


def read_arrow(path: Path) -> Iterator[ParsedRow]:
    return _read_table("Arrow", pa.ipc.open_stream, path)


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


def read_csv(path: Path) -> Iterator[ParsedRow]:
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
        return ParsedRow(line, {}, "".join(cells)[:SHOWN_CHARACTERS], enormous_row(count, "characters"))
    if len(cells) == len(header):
        return ParsedRow(line, dict(zip(header, cells, strict=True)))
    problem = Quarantined(QuarantineReason.MISSING_FIELD, f"{len(cells)} cells in the row, {len(header)} in the header")
    return ParsedRow(line, {}, json.dumps(cells, ensure_ascii=False), problem)
