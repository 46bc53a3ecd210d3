"""Metadata of an artifact in Dagster's UI."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from assets.views.column_schema import arrow_columns, parquet_columns
from assets.views.metadata import figures_table, optional_table, rounded, sample_answers, table


def test_table_with_an_unknown_value_has_an_empty_cell():
    """Unknown row counts are None or missing; zero is shown."""
    rows: list[dict[str, object]] = [
        {"file": "a.jsonl", "rows": None},
        {"file": "b.jsonl", "rows": 0},
        {"file": "c.jsonl"},
    ]
    assert [record.data for record in table(rows, ("file", "rows")).records] == [
        {"file": "a.jsonl", "rows": ""},
        {"file": "b.jsonl", "rows": "0"},
        {"file": "c.jsonl", "rows": ""},
    ]


def test_rounded_keeps_whole_numbers_and_four_digits():
    figures = {"steps": 123456, "loss": 0.566297223, "rate": 5e-7, "model": "a"}
    assert rounded(figures) == {"steps": 123456, "loss": 0.5663, "rate": 5e-7, "model": "a"}


def test_figures_table_has_held_out_before_last_batch_with_units():
    shown = figures_table({"eval/loss": 0.25, "eval/pairs": 83}, {"loss": 0.123456, "tokens_per_second": 15239.0})
    assert [record.data for record in shown["figures"].records] == [
        {"figure": "loss", "held-out": "0.25", "last batch": "0.1235", "unit": "mean of the pairs"},
        {"figure": "pairs", "held-out": "83", "last batch": "", "unit": "pairs"},
        {"figure": "tokens_per_second", "held-out": "", "last batch": "15,239", "unit": "tokens/s"},
    ]
    assert [column.name for column in shown["figures"].schema.columns] == ["figure", "held-out", "last batch", "unit"]


def test_empty_tables_and_samples_do_not_appear():
    assert optional_table("dropped", [], ("reason",)) == {} == sample_answers([])


def test_column_schemas_are_those_of_the_files(tmp_path: Path):
    found = pa.table({"row": pa.array([1], pa.int64()), "own": pa.array(["a"])})
    pq.write_table(found, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, found.schema) as stream:
        stream.write_table(found)
    for schema in (parquet_columns(tmp_path / "a.parquet"), arrow_columns(tmp_path / "a.arrow")):
        columns = schema["dagster/column_schema"].columns
        assert [(column.name, column.type) for column in columns] == [("row", "int64"), ("own", "string")]
        assert columns[0].description and columns[1].description is None
