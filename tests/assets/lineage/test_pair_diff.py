"""Which pairs were added and removed. Oracle: the pairs are letters, one a row, and the changes are read off them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.lineage.pair_diff import pair_changes
from training.contract.identity.fingerprint import fingerprint
from training.contract.identity.hash_cache import HashCache
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact, JobResult, Store


def published(store: Store, pairs: str, with_identity: bool = True) -> Artifact:
    """Rows in which each letter is a pair, in the file and on the line of its place."""
    rows = [{"source": "a.jsonl", "line": line, "identity": pair} for line, pair in enumerate(pairs, 1)]
    table = pa.Table.from_pylist(rows)
    how = Derivation(kind="raw_preferences", code_version="1", inputs={}, settings={"is": [pairs, with_identity]})
    with store.staging() as staging:
        pq.write_table(table if with_identity else table.drop_columns(["identity"]), staging / "preferences.parquet")
        return store.publish(staging, how, JobResult(fingerprint("raw_preferences", [pairs, with_identity]), {}))


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("abc", "abcd", ["1 pair added, the first in a.jsonl, line 4"]),
        ("abcd", "bd", ["2 pairs removed, the first was in a.jsonl, line 1"]),
        (
            "abc",
            "aXc",
            ["1 pair added, the first in a.jsonl, line 2", "1 pair removed, the first was in a.jsonl, line 2"],
        ),
        ("abc", "cab", []),
        ("abc", "abca", ["1 pair added, the first in a.jsonl, line 4"]),  # the copy, not what it copies
        ("abab", "ab", ["2 pairs removed, the first was in a.jsonl, line 3"]),
    ],
)
def test_what_was_added_and_removed_is_counted_with_the_first_place(tmp_path, before, now, words):
    store = Store(tmp_path)
    cache = HashCache(tmp_path / "hashes.json")
    changed = pair_changes(store, published(store, before).fingerprint, published(store, now), cache)
    assert changed is not None and list(changed.words()) == words


def test_what_cannot_be_compared_is_not_told(tmp_path):
    """Nothing before, the same before, something before that is gone, and rows that an earlier version read."""
    store, cache = Store(tmp_path), HashCache(tmp_path / "hashes.json")
    now = published(store, "ab")
    gone = fingerprint("raw_preferences", "gone")
    older = published(store, "a", with_identity=False).fingerprint
    before = (None, now.fingerprint, gone, older)
    assert [pair_changes(store, each, now, cache) for each in before] == [None] * 4
