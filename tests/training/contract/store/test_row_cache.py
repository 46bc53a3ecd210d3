"""The cache of rows against a dictionary, and with corrupt shards."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.contract.store.row_cache import RowCache, keys_of
from training.contract.store.store import Store

SCHEMA = pa.schema([("number", pa.int64()), ("texts", pa.list_(pa.string()))])
RULE = "a" * 64


def identity(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


def batch(numbers: list[int], version: int = 0) -> pa.RecordBatch:
    rows = [{"number": number, "texts": [f"{number}.{version}"] * (number % 4)} for number in numbers]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


class NumberCache(RowCache):
    name, title, again, schema = "rows", "cache of numbers", "count again", SCHEMA


def opened(store: Store, notes: list[str] | None = None) -> NumberCache:
    collected: list[str] = [] if notes is None else notes
    return NumberCache(store, RULE, collected.append)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def keys(numbers: list[int]) -> np.ndarray:
    return keys_of([identity(number) for number in numbers])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9), min_size=1, max_size=3), max_size=4),
    wanted=st.lists(st.integers(0, 45), max_size=30),
)
def test_rows_are_those_of_a_dictionary(tmp_path_factory, shards, wanted):
    """In the order of the request, with repetitions."""
    store = Store(tmp_path_factory.mktemp("store"))
    known: set[int] = set()
    for shard in shards:
        numbers = [number for part in shard for number in part]
        opened(store).add(keys(numbers), [batch(part) for part in shard])
        known |= set(numbers)
    cache = opened(store)
    assert cache.lookup(keys(wanted)).tolist() == [number in known for number in wanted]
    found = cache.rows(keys(wanted))
    if set(wanted) <= known:
        assert found is not None and found.to_pylist() == batch(wanted).to_pylist()
    else:
        assert found is None


def test_the_oldest_of_equal_keys_wins(store: Store):
    """Shards made in the same second are ordered by their names."""
    made = {v: opened(store).add(keys([1 + v, 2]), [batch([1 + v, 2], version=v)]) for v in (1, 2)}
    oldest = min(made, key=lambda v: (made[v].manifest.created, made[v].fingerprint))
    found = opened(store).rows(keys([2]))
    assert found is not None and found.to_pylist() == batch([2], version=oldest).to_pylist()


@pytest.mark.parametrize("name", ["index.safetensors", "rows.arrow"])
def test_a_corrupt_shard_is_set_aside_and_its_rows_are_missing(store: Store, name: str):
    opened(store).add(keys([1, 2]), [batch([1, 2])])
    opened(store).add(keys([3]), [batch([3])])
    [file] = [f for f in (store.root / "rows" / RULE).glob(f"*/{name}") if len(f.read_bytes()) == max_size(store, name)]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    notes: list[str] = []
    cache = opened(store, notes)
    if name == "rows.arrow":
        assert cache.lookup(keys([1, 2, 3])).all()
        assert cache.rows(keys([1, 2, 3])) is None
    assert cache.lookup(keys([1, 2, 3])).sum() in (1, 2)
    assert len(list((store.root / "corrupt" / "rows" / RULE).iterdir())) == 1
    assert len(notes) == 1 and "of the cache of numbers" in notes[0] and "to count again" in notes[0]


def max_size(store: Store, name: str) -> int:
    return max(len(file.read_bytes()) for file in (store.root / "rows" / RULE).glob(f"*/{name}"))


def test_other_processes_shards_are_found(store: Store):
    cache = opened(store)
    assert not cache.lookup(keys([1])).any()
    opened(store).add(keys([1]), [batch([1])])
    assert cache.lookup(keys([1])).all()
    assert cache.bytes() == sum(
        f.stat().st_size for f in (store.root / "rows").rglob("*") if f.suffix in (".arrow", ".safetensors")
    )


def test_shards_in_use_serve_half_of_their_rows(store: Store):
    used = opened(store).add(keys([1, 2, 3, 4]), [batch([1, 2, 3, 4])])
    opened(store).add(keys([5, 6, 7]), [batch([5, 6, 7])])
    assert opened(store).shards_in_use(keys([1, 2, 5])) == {used.fingerprint}
