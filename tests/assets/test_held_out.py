"""Pairs of two evaluations, by what is said in them. Oracle: rows written by hand, as earlier versions wrote them too."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from assets.held_out import rows_by_messages, rows_by_pair
from training.contract.manifest import Derivation
from training.contract.store import Artifact, Made, Store

SAID = [("role", pa.string()), ("content", pa.string())]
CALLS = [*SAID, ("tool_calls", pa.string()), ("tool_call_id", pa.string()), ("name", pa.string())]


def published(store: Store, kind: str, file: str, table: pa.Table, key: str) -> Artifact:
    with store.staging() as staging:
        pq.write_table(table, staging / file)
        how = Derivation(kind=kind, code_version="1", inputs={}, settings={"key": key})
        return store.publish(staging, how, Made(key * 64, {}))


def preferences(store: Store, key: str, message: list[tuple[str, pa.DataType]], *further: str) -> Artifact:
    """Rows 0 and 1, with or without columns that came later."""
    messages = pa.list_(pa.struct(message))
    text = {name: pa.string() for name in ("split", "source", *further)}
    columns = {
        "row": pa.int64(),
        "prompt": messages,
        "chosen": messages,
        "rejected": messages,
        "line": pa.int64(),
        **text,
    }
    rows: list[dict[str, Any]] = [
        {
            "row": row, "prompt": [{"role": "user", "content": f"Why {row}?"}], "line": row,
            "chosen": [{"role": "assistant", "content": "Because."}],
            "rejected": [{"role": "assistant", "content": "No idea."}],
            "split": "validation", "source": key, "source_name": key,
        }
        for row in range(2)
    ]  # fmt: skip
    return published(
        store, "raw_preferences", "preferences.parquet", pa.Table.from_pylist(rows, pa.schema(columns)), key
    )


def test_pairs_are_the_same_whether_or_not_their_table_has_columns_that_came_later(tmp_path: Path):
    store = Store(tmp_path / "store")
    before = preferences(store, "a", SAID)
    now = preferences(store, "b", CALLS, "tools", "source_name")
    evaluation = published(store, "evaluation", "pairs.parquet", pa.table({"row": [1], "margin": [0.5]}), "c")
    found = [rows_by_messages(evaluation, each) for each in (before, now)]
    assert found[0] == found[1] and list(found[0].values()) == [{"row": 1, "margin": 0.5}]


def test_pairs_of_one_source_are_found_by_its_name(tmp_path: Path):
    """The pair a-b is in both sources. A table of before there were names has no pairs of any."""
    rows = [
        {"chosen_key": chosen, "rejected_key": rejected, "source_name": name}
        for chosen, rejected, name in (("a", "b", "old"), ("c", "d", "old"), ("e", "f", None), ("a", "b", "new"))
    ]
    store = Store(tmp_path / "store")
    named = published(store, "evaluation", "pairs.parquet", pa.Table.from_pylist(rows), "a")
    before = published(
        store, "evaluation", "pairs.parquet", pa.Table.from_pylist(rows).drop_columns("source_name"), "b"
    )
    found = {name: set(rows_by_pair(named, name)) for name in (None, "old", "new", "other")}
    assert found == {None: {"ab", "cd", "ef"}, "old": {"ab", "cd"}, "new": {"ab"}, "other": set()}
    assert set(rows_by_pair(before)) == {"ab", "cd", "ef"} and not rows_by_pair(before, "old")
