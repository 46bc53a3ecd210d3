"""Metadata of an artifact in Dagster's UI."""

from assets.views.metadata import table


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
