"""Pairs added and removed. Oracle: pairs are letters, one per row, so the changes are obvious."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.lineage.pair_diff import pair_changes
from training.contract.identity.fingerprint import fingerprint
from training.contract.identity.hash_cache import HashCache
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store


def publish(store: Store, pairs: str, with_identity: bool = True) -> Artifact[Any]:
    """Publish rows with a letter as each pair; its line is its position."""
    rows = [{"source": "a.jsonl", "line": line, "identity": pair} for line, pair in enumerate(pairs, 1)]
    table = pa.Table.from_pylist(rows)
    settings = {"is": [pairs, with_identity]}
    derivation = Derivation(kind="raw_preferences", code_version="1", inputs={}, settings=settings)
    with store.staging() as staging:
        pq.write_table(table if with_identity else table.drop_columns(["identity"]), staging / "preferences.parquet")
        return store.publish(staging, derivation, JobResult(fingerprint("raw_preferences", settings["is"])))


@pytest.mark.parametrize(
    ("before", "now", "texts"),
    [
        ("abc", "abcd", ["1 pair added, the first in a.jsonl, line 4"]),
        ("abcd", "bd", ["2 pairs removed, the first was in a.jsonl, line 1"]),
        (
            "abc",
            "aXc",
            ["1 pair added, the first in a.jsonl, line 2", "1 pair removed, the first was in a.jsonl, line 2"],
        ),
        ("abc", "cab", []),
        ("abc", "abca", ["1 pair added, the first in a.jsonl, line 4"]),  # the copy, not the original
        ("abab", "ab", ["2 pairs removed, the first was in a.jsonl, line 3"]),
    ],
)
def test_pair_changes_counts_pairs_and_names_the_first_place(tmp_path, before, now, texts):
    store = Store(tmp_path)
    cache = HashCache(tmp_path / "hashes.json")
    changes = pair_changes(store, publish(store, before).fingerprint, publish(store, now), cache)
    assert changes is not None and list(changes.words()) == texts


def test_pair_changes_without_comparable_rows_is_none(tmp_path):
    """Nothing before, the same artifact, a missing artifact, and rows read by an earlier version."""
    store, cache = Store(tmp_path), HashCache(tmp_path / "hashes.json")
    now = publish(store, "ab")
    missing = fingerprint("raw_preferences", "missing")
    older = publish(store, "a", with_identity=False).fingerprint
    fingerprints = (None, now.fingerprint, missing, older)
    assert [pair_changes(store, before, now, cache) for before in fingerprints] == [None] * 4
