"""What people see of an artifact in Dagster."""

from assets.views.metadata import table


def test_what_is_not_known_is_an_empty_cell_and_zero_is_zero():
    """A file whose rows cannot be counted has None for their number."""
    shown = table(
        [{"file": "a.jsonl", "rows": None}, {"file": "b.jsonl", "rows": 0}, {"file": "c.jsonl"}], ("file", "rows")
    )
    assert [record.data for record in shown.records] == [
        {"file": "a.jsonl", "rows": ""},
        {"file": "b.jsonl", "rows": "0"},
        {"file": "c.jsonl", "rows": ""},
    ]
