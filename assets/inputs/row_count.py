"""Row count of a preference file, for display, without parsing pairs.

It is computed in Dagster's process with little memory for any file: a .gz of a few megabytes can be one line of many gigabytes.
"""

import csv
import json
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.files.local_files import data_suffix, open_data

_PIECE = 1 << 20  # of a line
_LONGEST_JSON = 1 << 28


def count_rows(path: Path) -> int | None:
    """Return the number of rows in `path`; None if the file cannot be read in this simple way."""
    try:
        match data_suffix(path):
            case ".parquet":
                with open_data(path) as file:
                    return int(pq.read_metadata(file).num_rows)
            case ".arrow":
                with open_data(path) as file:
                    return sum(int(batch.num_rows) for batch in pa.ipc.open_stream(file))
            case ".csv":
                with TextIOWrapper(open_data(path), encoding="utf-8", newline="") as text:
                    return max(0, sum(1 for row in csv.reader(_whole_lines(text)) if row) - 1)
            case ".json":
                return _count_objects(path)
        return _count_lines(path)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, MemoryError, csv.Error, pa.ArrowException):
        return None


def _count_lines(path: Path) -> int:
    count, is_blank = 0, True
    with open_data(path) as file:
        while piece := file.readline(_PIECE):
            if is_blank and piece.strip():
                count, is_blank = count + 1, False
            is_blank = is_blank or piece.endswith(b"\n")
    return count


def _whole_lines(text: TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_PIECE):
        if len(line) == _PIECE:
            raise ValueError(f"a line has over {_PIECE:,} characters")
        yield line


def _count_objects(path: Path) -> int | None:
    """Count the items of a JSON list, or the lines of a JSON Lines file with this extension, which is common."""
    with open_data(path) as file:
        text = file.read(_LONGEST_JSON + 1)
    if len(text) > _LONGEST_JSON:
        return None
    try:
        content = json.loads(text)
    except ValueError:
        return _count_lines(path)
    return len(content) if isinstance(content, list) else 1
