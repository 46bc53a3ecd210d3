"""How many rows a preference file has: a number for people, found without parsing pairs."""

import csv
import json
import zlib
from io import TextIOWrapper
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.recipe_files import data_suffix, open_data


def count_rows(path: Path) -> int | None:
    """The number of rows that a reader of `path` would see; None where the file cannot be read this simply."""
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
                    return max(0, sum(1 for row in csv.reader(text) if row) - 1)
            case ".json":
                return _objects(path)
        return _lines(path)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, csv.Error, pa.ArrowException):
        return None


def _lines(path: Path) -> int:
    with open_data(path) as file:
        return sum(1 for line in file if line.strip())


def _objects(path: Path) -> int:
    """A list of objects, or, as many publish it under this name, JSON lines."""
    try:
        with open_data(path) as file:
            content = json.loads(file.read())
    except ValueError:
        return _lines(path)
    return len(content) if isinstance(content, list) else 1
