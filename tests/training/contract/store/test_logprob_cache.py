"""The log-prob cache, compared with a plain dictionary, and with damaged, missing and unreadable files."""

import errno
import hashlib
import math
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from training.contract.errors import UnreadableArtifact
from training.contract.store import logprob_cache as cache_module
from training.contract.store import manifest
from training.contract.store.artifact import JobResult
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.manifest import MANIFEST, Derivation, Manifest
from training.contract.store.store import Store

RULE = scoring_rule("a" * 64, "float32")


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def as_array(*keys: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def add(cache: LogprobCache, rows: dict[bytes, list[float]]) -> str:
    counts = np.array([len(tokens) for tokens in rows.values()], np.int32)
    tokens = np.array([t for row in rows.values() for t in row], np.float32)
    return cache.add(as_array(*rows), counts, tokens).fingerprint


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("other", [("b" * 64, "float32"), ("a" * 64, "bfloat16")])
def test_scoring_rule_of_other_weights_or_dtype_differs(other):
    assert scoring_rule("a" * 64, "float32") == RULE
    assert scoring_rule(*other) != RULE


def test_scoring_rule_of_another_algorithm_differs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_module, "SCORING_VERSION", "another")
    assert scoring_rule("a" * 64, "float32") != RULE


def test_add_of_equal_sums_and_other_tokens_gives_another_shard(store):
    cache = LogprobCache(store, RULE)
    assert len({add(cache, {key(1): tokens}) for tokens in ([-1.0, -2.0], [-2.0, -1.0])}) == 2


def test_lookup_in_empty_cache_finds_nothing(store):
    hits = LogprobCache(store, RULE).lookup(as_array(key(1), key(2)))
    assert hits.found_Q.tolist() == [False, False]
    assert all(math.isnan(value) for value in hits.sums_Q) and hits.counts_Q.tolist() == [-1, -1]
    assert LogprobCache(store, RULE).lookup(as_array()).found_Q.shape == (0,)


def test_lookup_returns_sums_counts_and_tokens_in_the_order_of_keys(store):
    cache = LogprobCache(store, RULE)
    add(cache, {key(1): [-1.0, -2.5], key(2): []})
    add(cache, {key(3): [-4.0]})
    hits = cache.lookup(as_array(key(3), key(9), key(1), key(2), key(3)))
    assert hits.found_Q.tolist() == [True, False, True, True, True]
    assert hits.sums_Q[hits.found_Q].tolist() == [-4.0, -3.5, 0.0, -4.0]
    assert hits.counts_Q.tolist() == [1, -1, 2, 0, 1]
    assert cache.token_logprobs(key(1)).tolist() == [-1.0, -2.5]
    assert cache.token_logprobs(key(2)).tolist() == [] and cache.token_logprobs(key(9)) is None


def test_lookup_under_another_rule_finds_nothing(store):
    add(LogprobCache(store, RULE), {key(1): [-1.0]})
    assert not LogprobCache(store, scoring_rule("a" * 64, "bfloat16")).lookup(as_array(key(1))).found_Q.any()


def test_lookup_finds_later_shards_of_another_writer(store):
    reader, writer = LogprobCache(store, RULE), LogprobCache(store, RULE)
    assert not reader.lookup(as_array(key(1))).found_Q.any()
    add(writer, {key(1): [-1.0]})
    assert reader.lookup(as_array(key(1))).found_Q.all()


def test_add_sums_in_float64(store):
    """Above 2^24 float32 lacks odd numbers: added one by one, 999 ones would vanish."""
    tokens = [-(2.0**24)] + [-1.0] * 999
    cache = LogprobCache(store, RULE)
    add(cache, {key(1): tokens})
    assert cache.lookup(as_array(key(1))).sums_Q[0] == -(2.0**24) - 999


PREFIX = b"\xff" * 8


def test_lookup_of_keys_with_equal_prefix_finds_the_right_rows(store):
    """The first 8 bytes are equal, later bytes differ."""
    colliding = [PREFIX + bytes([i]) * 24 for i in range(5)]
    cache = LogprobCache(store, RULE)
    add(cache, {k: [-float(i)] for i, k in enumerate(colliding[:3])})
    add(cache, {colliding[3]: [-3.0], key(1): [-7.0]})
    hits = cache.lookup(as_array(colliding[3], colliding[4], colliding[0], colliding[2], key(1), b"\xff" * 32))
    assert hits.found_Q.tolist() == [True, False, True, True, True, False]
    assert hits.sums_Q[hits.found_Q].tolist() == [-3.0, 0.0, -2.0, -7.0]
    assert cache.token_logprobs(colliding[3]).tolist() == [-3.0] and cache.token_logprobs(colliding[4]) is None


_BYTE = st.sampled_from([b"\x00", b"\x7f", b"\x80", b"\xff"])
_KEYS = st.builds(lambda head, tail: head * 8 + tail * 24, _BYTE, _BYTE)


@settings(max_examples=25, deadline=None)
@given(shards=st.lists(st.lists(_KEYS, unique=True, max_size=6), max_size=4), asked=st.lists(_KEYS, max_size=20))
def test_lookup_agrees_with_a_dictionary(tmp_path_factory, shards, asked):
    cache = LogprobCache(Store(tmp_path_factory.mktemp("store")), RULE)
    known: dict[bytes, list[float]] = {}
    for keys in shards:
        rows = {k: [-float(k[0]), -float(k[-1])] for k in keys}
        add(cache, rows)
        known |= {k: sum(tokens) for k, tokens in rows.items()}
    hits = cache.lookup(as_array(*asked))
    assert hits.found_Q.tolist() == [k in known for k in asked]
    assert hits.sums_Q[hits.found_Q].tolist() == [known[k] for k in asked if k in known]


def made_in_turn(store, cache: LogprobCache, *contents) -> list[str]:
    """Add shards with these contents, each a second younger than its predecessor."""
    shards = [add(cache, content) for content in contents]
    for age, shard in enumerate(shards):
        path = store.folder(cache.kind, shard) / MANIFEST
        aged = Manifest.loads(path.read_bytes()).model_copy(update={"created": f"2020-01-01T00:00:{age:02}+00:00"})
        path.write_bytes(aged.dumps())
    return shards


def test_lookup_of_sequence_in_several_shards_uses_the_oldest(store):
    """So a recomputed table has the same bits, in any order of fingerprints."""
    cache, keys = LogprobCache(store, RULE), [key(n) for n in range(40)]
    made_in_turn(store, cache, *({k: [-1.0 - i / 8] for k in keys} for i in range(6)))
    assert (LogprobCache(store, RULE).lookup(as_array(*keys)).sums_Q == -1.0).all()


def test_lookup_in_shards_of_one_second_is_the_same_for_all_readers(store, tmp_path):
    """Also for a reader with only the other shard at first."""
    cache = LogprobCache(store, RULE)
    first, _ = sorted(made_in_turn(store, cache, {key(1): [-1.0]}) + made_in_turn(store, cache, {key(1): [-2.0]}))
    hidden = store.folder(cache.kind, first).rename(tmp_path / first)
    early = LogprobCache(store, RULE)
    assert early.lookup(as_array(key(1))).found_Q.all()
    hidden.rename(store.folder(cache.kind, first))
    assert early.lookup(as_array(key(1))).sums_Q == LogprobCache(store, RULE).lookup(as_array(key(1))).sums_Q


def damage_bit(folder: Path, name: str = "index.safetensors") -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def truncate(folder: Path) -> None:
    path = folder / "tokens.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def remove_file(folder: Path) -> None:
    (folder / "index.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize("damage", [damage_bit, truncate, remove_file, remove_manifest])
def test_lookup_sets_a_corrupt_shard_aside_and_misses_its_sequences(store, damage):
    writer = LogprobCache(store, RULE)
    add(writer, {key(1): [-1.0]})
    broken = add(writer, {key(2): [-2.0]})
    damage(store.folder(writer.kind, broken))
    notes: list[str] = []
    cache = LogprobCache(store, RULE, notes.append)
    assert cache.lookup(as_array(key(1), key(2))).found_Q.tolist() == [True, False]
    assert len(notes) == 1 and broken[:12] in notes[0] and "corrupt" in notes[0]
    assert len(list((store.root / "corrupt").rglob(broken))) == 1
    add(cache, {key(2): [-2.0]})
    assert cache.lookup(as_array(key(2))).sums_Q.tolist() == [-2.0] and len(notes) == 1


REFUSED = {
    "manifest": (Path, "read_bytes", errno.ESTALE),
    "hashes": (manifest, "file_hashes", errno.EIO),
    "mapping": (mmap, "mmap", errno.ENOMEM),
}


@pytest.mark.parametrize(("owner", "name", "number"), REFUSED.values(), ids=REFUSED)
def test_lookup_of_unreadable_shard_raises_and_keeps_it(store, monkeypatch, owner, name, number):
    """A file server may be down for a while, or the process may have too many mappings; the bytes may be intact."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    shard = store.folder(LogprobCache(store, RULE).kind, add(LogprobCache(store, RULE), {key(1): [-1.0]}))
    cache = LogprobCache(store, RULE, pytest.fail)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse)
        message = rf"{shard}.*{os.strerror(number)}; .*\[unreadable-artifact\]"
        with pytest.raises(UnreadableArtifact, match=message):
            cache.lookup(as_array(key(1)))
    assert shard.is_dir() and cache.lookup(as_array(key(1))).sums_Q.tolist() == [-1.0]


def test_token_logprobs_verifies_the_tokens_but_lookup_does_not(store):
    """A lookup needs the index only; the tokens are nearly all of the bytes."""
    cache = LogprobCache(store, RULE)
    broken = add(cache, {key(2): [-2.0, -3.0]})
    add(cache, {key(1): [-1.0]})
    damage_bit(store.folder(cache.kind, broken), "tokens.safetensors")
    notes: list[str] = []
    reader = LogprobCache(store, RULE, notes.append)
    assert reader.lookup(as_array(key(1), key(2))).sums_Q.tolist() == [-1.0, -5.0] and notes == []
    assert reader.token_logprobs(key(2)) is None
    assert len(notes) == 1 and "tokens.safetensors" in notes[0] and notes[0].endswith("[wrong-hash]")
    assert reader.lookup(as_array(key(1), key(2))).found_Q.tolist() == [True, False]
    add(cache, {key(2): [-2.0, -3.0]})
    assert reader.token_logprobs(key(2)).tolist() == [-2.0, -3.0]


def test_token_logprobs_uses_an_intact_shard_after_a_corrupt_one(store):
    cache = LogprobCache(store, RULE)
    first, _ = made_in_turn(store, cache, *({key(1): [-1.0, -2.0], key(n): [-9.0]} for n in (2, 3)))
    damage_bit(store.folder(cache.kind, first), "tokens.safetensors")
    notes: list[str] = []
    assert LogprobCache(store, RULE, notes.append).token_logprobs(key(1)).tolist() == [-1.0, -2.0]
    assert len(notes) == 1 and first in notes[0]


def test_corrupt_shard_set_aside_by_another_process_is_dropped_without_a_note(store):
    """Both processes have opened the shard; the second one finds it missing."""
    writer = LogprobCache(store, RULE)
    broken = add(writer, {key(1): [-1.0]})
    notes: list[list[str]] = [[], []]
    first, second = (LogprobCache(store, RULE, list_.append) for list_ in notes)
    assert first.lookup(as_array(key(1))).found_Q.all() and second.lookup(as_array(key(1))).found_Q.all()
    damage_bit(store.folder(writer.kind, broken), "tokens.safetensors")
    assert first.token_logprobs(key(1)) is None and second.token_logprobs(key(1)) is None
    assert [len(list_) for list_ in notes] == [1, 0]
    assert not second.lookup(as_array(key(1))).found_Q.any()


def test_tail_sums_agree_with_slices_of_the_tokens(store):
    """Several shards, and several starts per row."""
    rng = np.random.default_rng(0)
    cache = LogprobCache(store, RULE)
    known: dict[bytes, list[float]] = {}
    for size in (40, 1, 17):
        rows = {rng.bytes(32): (-rng.random(rng.integers(0, 9))).astype(np.float32).tolist() for _ in range(size)}
        add(cache, rows)
        known |= rows
    asked = [k for k in known for _ in range(3)]
    starts = [int(rng.integers(0, len(known[k]) + 1)) for k in asked]
    expected = [math.fsum(known[k][start:]) for k, start in zip(asked, starts, strict=True)]
    found = cache.tail_sums(as_array(*asked, key(9)), np.array([*starts, 0]))
    assert found[:-1].tolist() == pytest.approx(expected, rel=1e-12) and math.isnan(found[-1])


def test_tail_sums_in_corrupt_shard_are_nan_unless_another_shard_has_them(store):
    cache = LogprobCache(store, RULE)
    first, _ = made_in_turn(store, cache, *({key(1): [-1.0, -2.0], key(n): [-9.0]} for n in (2, 3)))
    damage_bit(store.folder(cache.kind, first), "tokens.safetensors")
    notes: list[str] = []
    found = LogprobCache(store, RULE, notes.append).tail_sums(as_array(key(1), key(2), key(3)), np.array([1, 0, 0]))
    assert found[0] == -2.0 and sorted(np.isnan(found[1:])) == [False, True]
    assert len(notes) == 1 and "tokens.safetensors" in notes[0] and notes[0].endswith("[wrong-hash]")


def test_lookup_opens_each_shard_once_per_process(store):
    """A shard damaged after the first lookup still answers in this process."""
    cache = LogprobCache(store, RULE)
    name = add(cache, {key(1): [-1.0]})
    assert cache.lookup(as_array(key(1))).found_Q.all()
    (store.folder(cache.kind, name) / MANIFEST).write_text("{}")
    add(cache, {key(2): [-2.0]})
    assert cache.lookup(as_array(key(1), key(2))).found_Q.all()
    notes: list[str] = []
    assert LogprobCache(store, RULE, notes.append).lookup(as_array(key(1), key(2))).found_Q.tolist() == [False, True]
    assert len(notes) == 1 and name in notes[0]


def test_lookup_of_many_rows_in_many_shards_agrees_with_a_dictionary(store):
    """Small and empty shards, ragged tokens, shuffled keys."""
    rng = np.random.default_rng(0)
    cache = LogprobCache(store, RULE)
    known: dict[bytes, list[float]] = {}
    for size in (1, 0, 300, 2, 57):
        rows = {rng.bytes(32): rng.normal(size=rng.integers(0, 5)).astype(np.float32).tolist() for _ in range(size)}
        add(cache, rows)
        known |= rows
    asked = [*known, *(rng.bytes(32) for _ in range(100))]
    rng.shuffle(asked)
    hits = cache.lookup(as_array(*asked))
    assert hits.found_Q.tolist() == [k in known for k in asked]
    assert hits.counts_Q.tolist() == [len(known[k]) if k in known else -1 for k in asked]
    assert np.allclose(hits.sums_Q, [math.fsum(known[k]) if k in known else np.nan for k in asked], equal_nan=True)
    for k in asked[:40]:
        tokens = cache.token_logprobs(k)
        assert (tokens is None) == (k not in known) and (tokens is None or tokens.tolist() == known[k])


def test_lookup_of_over_a_million_keys_finds_the_known_ones(store):
    """More than one block: 0.6 million unknown keys, a known one, 0.6 million, another known one."""
    cache, rng = LogprobCache(store, RULE), np.random.default_rng(0)
    add(cache, {key(1): [-1.0], key(2): [-2.0, -4.0]})
    unknown = rng.integers(256, size=(600_000, 32), dtype=np.uint8)
    asked = np.concatenate([unknown, as_array(key(1)), unknown[::-1], as_array(key(2))])
    hits, tails = cache.lookup(asked), cache.tail_sums(asked, np.ones(len(asked), np.int64))
    assert np.flatnonzero(hits.found_Q).tolist() == [600_000, 1_200_001]
    assert hits.sums_Q[hits.found_Q].tolist() == [-1.0, -6.0] and tails[hits.found_Q].tolist() == [0.0, -4.0]


PASS = """
import hashlib, sys
from pathlib import Path
import numpy as np
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.store import Store

cache = LogprobCache(Store(Path(sys.argv[1])), sys.argv[2])
keys = [hashlib.sha256(str(n).encode()).digest() for n in range(4000)]
known = cache.lookup(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)).found_Q
print("ready", flush=True)
missing = np.flatnonzero(~known)
for part in np.array_split(missing, range(10, len(missing), 10)):
    if len(part):
        own = np.frombuffer(b"".join(keys[n] for n in part), np.uint8).reshape(-1, 32)
        cache.add(own, np.ones(len(part), np.int32), -part.astype(np.float32))
        print(part[-1], flush=True)
"""


def test_scoring_killed_at_random_keeps_committed_shards(store):
    """Started and killed eight times, each time after up to five commits and somewhere in the next one."""
    draw = random.Random(0)
    committed: set[int] = set()
    keys = as_array(*(key(n) for n in range(4000)))
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", PASS, str(store.root), RULE], stdout=subprocess.PIPE, text=True
        ) as scorer:
            assert scorer.stdout is not None and scorer.stdout.readline() == "ready\n"
            committed |= {int(scorer.stdout.readline()) for _ in range(draw.randrange(6))}
            time.sleep(draw.uniform(0.0, 0.02))
            scorer.send_signal(signal.SIGKILL)
            committed |= {int(line) for line in scorer.stdout.read().splitlines()}
        hits = LogprobCache(store, RULE).lookup(keys)
        assert committed <= set(np.flatnonzero(hits.found_Q))
        assert np.array_equal(hits.sums_Q[hits.found_Q], -np.flatnonzero(hits.found_Q).astype(np.float64))
    assert not (store.root / "corrupt").exists()


def test_lookup_sets_aside_a_shard_of_another_rule(store):
    """It is intact, but in the folder of this rule."""
    cache = LogprobCache(store, RULE)
    name = add(cache, {key(1): [-1.0]})
    foreign = LogprobCache(store, "f" * 64)
    other = add(foreign, {key(2): [-1.0]})
    shutil.copytree(store.folder(foreign.kind, other), store.folder(cache.kind, other))
    notes: list[str] = []
    assert LogprobCache(store, RULE, notes.append).lookup(as_array(key(1), key(2))).found_Q.tolist() == [True, False]
    assert len(notes) == 1 and name[:12] not in notes[0]


@pytest.mark.parametrize(
    ("sums", "value"),
    [(np.zeros(1), "'sums': (1,)"), (np.zeros(2, np.float32), "'sums': dtype('float32')")],
)
def test_lookup_sets_aside_a_shard_with_other_arrays(store, sums, value):
    """It is intact, but has two keys and one sum, or sums of another dtype."""
    cache = LogprobCache(store, RULE)
    with store.staging() as staging:
        index = {"keys": as_array(key(1), key(2)), "sums": sums, "counts": np.ones(2, np.int32)}
        save_file(index, staging / "index.safetensors")
        save_file({"tokens": np.zeros(2, np.float32)}, staging / "tokens.safetensors")
        store.publish(
            staging, Derivation(kind=cache.kind, code_version="9", inputs={}, settings={}), JobResult("d" * 64)
        )
    notes: list[str] = []
    assert not LogprobCache(store, RULE, notes.append).lookup(as_array(key(1), key(2))).found_Q.any()
    assert len(notes) == 1 and value in notes[0] and notes[0].endswith("[corrupt-shard]")


def test_add_of_non_finite_logprob_fails(store):
    with pytest.raises(AssertionError, match="not finite"):
        add(LogprobCache(store, RULE), {key(1): [float("nan")]})
    assert store.fingerprints(f"memo/{RULE}") == []


def test_importing_the_cache_does_not_import_torch():
    modules = ("training.contract.store.logprob_cache", "training.contract.store.logprob_table")
    loaded = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded]).returncode == 0
