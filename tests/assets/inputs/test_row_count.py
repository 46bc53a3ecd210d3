"""Row counts for display. Oracle: the reader of preference files."""

import gzip
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.inputs.row_count import count_rows
from training.contract.files.local_files import data_files
from training.data.reading.readers import read_records

JSON_LINES = b'{"a": 1}\n\n{"a": 2}\n{"a": 3}'


def _stream() -> bytes:
    table, sink = pa.table({"a": [1, 2, 3]}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1, 2, 3]}), sink)
    return sink.getvalue().to_pybytes()


CONTENTS = {
    "a.jsonl": JSON_LINES,
    "b.json": b'[{"a": 1}, {"a": 2}]',
    "c.json": JSON_LINES,
    "one.json": b'{"a": 1, "b": 2}',
    "d.CSV": b'a,b\n1,"x\ny"\n2,z\n',
    "e.arrow": _stream(),
    "f.parquet": _parquet(),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONTENTS)
def test_count_rows_equals_the_number_of_read_records(tmp_path, name, packed):
    path = tmp_path / (name + ".GZ" if packed else name)
    path.write_bytes(gzip.compress(CONTENTS[name]) if packed else CONTENTS[name])
    [file] = data_files(str(path))
    assert count_rows(path) == len(list(read_records(file))) > (name != "one.json")


def test_count_rows_of_an_unreadable_file_is_none(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(JSON_LINES)[:-9])
    (tmp_path / "plain.csv.gz").write_bytes(b"a,b\n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "deep.json").write_bytes(b"[" * 100_000)
    names = ("cut.jsonl.gz", "plain.csv.gz", "a.parquet", "deep.json", "none.json")
    assert [count_rows(tmp_path / name) for name in names] == [None] * 5


def test_count_rows_with_a_flipped_bit_does_not_raise(tmp_path):
    """A flipped bit in a length makes Arrow allocate more memory than the machine has."""
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), pa.schema({"a": pa.int64()})) as writer:
        writer.write_table(pa.table({"a": list(range(50))}))
    intact, file = sink.getvalue().to_pybytes(), tmp_path / "rows.arrow"
    counts = set()
    for index in range(len(intact)):
        file.write_bytes(intact[:index] + bytes([intact[index] ^ 0x40]) + intact[index + 1 :])
        counts.add(count_rows(file))
    assert {None, 50} <= counts


@pytest.mark.parametrize(
    ("name", "start", "megabytes", "rows"),
    [
        ("a.jsonl", b'{"a": 1}\n{"b": "', 64, 2),
        ("b.csv", b'a\n"', 64, None),
        ("c.json", b'["', 257, None),
    ],
)
def test_count_rows_of_a_long_line_needs_little_memory(tmp_path, name, start, megabytes, rows):
    """A .gz of four megabytes can hold a line of four gigabytes, for which Dagster's process lacks the memory."""
    with gzip.open(tmp_path / f"{name}.gz", "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(megabytes):
            file.write(b"a" * (1 << 20))
        file.write(b'"]' if name == "c.json" else b"\n \n")
    tracemalloc.start()
    try:
        assert count_rows(tmp_path / f"{name}.gz") == rows
        assert tracemalloc.get_traced_memory()[1] < (600 if name == "c.json" else 16) << 20
    finally:
        tracemalloc.stop()
