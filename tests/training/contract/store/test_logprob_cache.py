"""The memo against a plain dictionary, and against everything that happens to files."""

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
from training.contract.store import logprob_cache as memo_module
from training.contract.store import manifest
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.manifest import MANIFEST, Derivation, Manifest
from training.contract.store.store import JobResult, Store

RULE = scoring_rule("a" * 64, "float32")


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def as_array(*keys: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def add(memo: LogprobCache, rows: dict[bytes, list[float]]) -> str:
    counts = np.array([len(tokens) for tokens in rows.values()], np.int32)
    tokens = np.array([t for row in rows.values() for t in row], np.float32)
    return memo.add(as_array(*rows), counts, tokens).fingerprint


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("other", [("b" * 64, "float32"), ("a" * 64, "bfloat16")])
def test_other_weights_or_another_dtype_make_another_rule(other):
    assert scoring_rule("a" * 64, "float32") == RULE
    assert scoring_rule(*other) != RULE


def test_another_algorithm_makes_another_rule(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memo_module, "SCORING_VERSION", "another")
    assert scoring_rule("a" * 64, "float32") != RULE


def test_shards_of_the_same_sums_and_other_tokens_are_two(store):
    memo = LogprobCache(store, RULE)
    assert len({add(memo, {key(1): tokens}) for tokens in ([-1.0, -2.0], [-2.0, -1.0])}) == 2


def test_an_empty_memo_knows_nothing(store):
    hits = LogprobCache(store, RULE).lookup(as_array(key(1), key(2)))
    assert hits.found_Q.tolist() == [False, False]
    assert all(math.isnan(value) for value in hits.sums_Q) and hits.counts_Q.tolist() == [-1, -1]
    assert LogprobCache(store, RULE).lookup(as_array()).found_Q.shape == (0,)


def test_it_answers_sums_counts_and_tokens_in_the_order_asked_for(store):
    memo = LogprobCache(store, RULE)
    add(memo, {key(1): [-1.0, -2.5], key(2): []})
    add(memo, {key(3): [-4.0]})
    hits = memo.lookup(as_array(key(3), key(9), key(1), key(2), key(3)))
    assert hits.found_Q.tolist() == [True, False, True, True, True]
    assert hits.sums_Q[hits.found_Q].tolist() == [-4.0, -3.5, 0.0, -4.0]
    assert hits.counts_Q.tolist() == [1, -1, 2, 0, 1]
    assert memo.token_logprobs(key(1)).tolist() == [-1.0, -2.5]
    assert memo.token_logprobs(key(2)).tolist() == [] and memo.token_logprobs(key(9)) is None


def test_rules_do_not_see_each_other(store):
    add(LogprobCache(store, RULE), {key(1): [-1.0]})
    assert not LogprobCache(store, scoring_rule("a" * 64, "bfloat16")).lookup(as_array(key(1))).found_Q.any()


def test_it_sees_what_another_writer_adds_later(store):
    reader, writer = LogprobCache(store, RULE), LogprobCache(store, RULE)
    assert not reader.lookup(as_array(key(1))).found_Q.any()
    add(writer, {key(1): [-1.0]})
    assert reader.lookup(as_array(key(1))).found_Q.all()


def test_sums_are_taken_in_float64(store):
    """Above 2^24 float32 has no odd numbers: added one by one, 999 ones would vanish."""
    tokens = [-(2.0**24)] + [-1.0] * 999
    memo = LogprobCache(store, RULE)
    add(memo, {key(1): tokens})
    assert memo.lookup(as_array(key(1))).sums_Q[0] == -(2.0**24) - 999


PREFIX = b"\xff" * 8


def test_keys_with_one_prefix_are_told_apart(store):
    """Eight equal bytes, then different ones: those present are found, and no other one."""
    colliding = [PREFIX + bytes([i]) * 24 for i in range(5)]
    memo = LogprobCache(store, RULE)
    add(memo, {k: [-float(i)] for i, k in enumerate(colliding[:3])})
    add(memo, {colliding[3]: [-3.0], key(1): [-7.0]})
    hits = memo.lookup(as_array(colliding[3], colliding[4], colliding[0], colliding[2], key(1), b"\xff" * 32))
    assert hits.found_Q.tolist() == [True, False, True, True, True, False]
    assert hits.sums_Q[hits.found_Q].tolist() == [-3.0, 0.0, -2.0, -7.0]
    assert memo.token_logprobs(colliding[3]).tolist() == [-3.0] and memo.token_logprobs(colliding[4]) is None


_BYTE = st.sampled_from([b"\x00", b"\x7f", b"\x80", b"\xff"])
_KEYS = st.builds(lambda head, tail: head * 8 + tail * 24, _BYTE, _BYTE)


@settings(max_examples=25, deadline=None)
@given(shards=st.lists(st.lists(_KEYS, unique=True, max_size=6), max_size=4), asked=st.lists(_KEYS, max_size=20))
def test_it_is_a_dictionary(tmp_path_factory, shards, asked):
    memo = LogprobCache(Store(tmp_path_factory.mktemp("store")), RULE)
    known: dict[bytes, list[float]] = {}
    for keys in shards:
        rows = {k: [-float(k[0]), -float(k[-1])] for k in keys}
        add(memo, rows)
        known |= {k: sum(tokens) for k, tokens in rows.items()}
    hits = memo.lookup(as_array(*asked))
    assert hits.found_Q.tolist() == [k in known for k in asked]
    assert hits.sums_Q[hits.found_Q].tolist() == [known[k] for k in asked if k in known]


def made_in_turn(store, memo: LogprobCache, *contents) -> list[str]:
    """Shards of these contents, each a second younger than the one before."""
    shards = [add(memo, content) for content in contents]
    for age, shard in enumerate(shards):
        path = store.folder(memo.kind, shard) / MANIFEST
        aged = Manifest.loads(path.read_bytes()).model_copy(update={"created": f"2020-01-01T00:00:{age:02}+00:00"})
        path.write_bytes(aged.dumps())
    return shards


def test_of_two_shards_with_one_sequence_the_first_to_be_made_answers(store):
    """So that a table made again holds the same bits; whichever fingerprint is the smallest, however many the rows."""
    memo, keys = LogprobCache(store, RULE), [key(n) for n in range(40)]
    made_in_turn(store, memo, *({k: [-1.0 - i / 8] for k in keys} for i in range(6)))
    assert (LogprobCache(store, RULE).lookup(as_array(*keys)).sums_Q == -1.0).all()


def test_of_two_that_were_made_within_a_second_one_answers_whoever_asks(store, tmp_path):
    """Also who had opened the other one before it came."""
    memo = LogprobCache(store, RULE)
    first, _ = sorted(made_in_turn(store, memo, {key(1): [-1.0]}) + made_in_turn(store, memo, {key(1): [-2.0]}))
    hidden = store.folder(memo.kind, first).rename(tmp_path / first)
    early = LogprobCache(store, RULE)
    assert early.lookup(as_array(key(1))).found_Q.all()
    hidden.rename(store.folder(memo.kind, first))
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
def test_a_broken_shard_is_set_aside_and_its_sequences_count_as_missing(store, damage):
    writer = LogprobCache(store, RULE)
    add(writer, {key(1): [-1.0]})
    broken = add(writer, {key(2): [-2.0]})
    damage(store.folder(writer.kind, broken))
    said: list[str] = []
    memo = LogprobCache(store, RULE, said.append)
    assert memo.lookup(as_array(key(1), key(2))).found_Q.tolist() == [True, False]
    assert len(said) == 1 and broken[:12] in said[0] and "corrupt" in said[0]
    assert len(list((store.root / "corrupt").rglob(broken))) == 1
    add(memo, {key(2): [-2.0]})
    assert memo.lookup(as_array(key(2))).sums_Q.tolist() == [-2.0] and len(said) == 1


REFUSED = {
    "manifest": (Path, "read_bytes", errno.ESTALE),
    "hashes": (manifest, "file_hashes", errno.EIO),
    "mapping": (mmap, "mmap", errno.ENOMEM),
}


@pytest.mark.parametrize(("owner", "name", "number"), REFUSED.values(), ids=REFUSED)
def test_a_shard_that_cannot_be_read_now_stays_and_answers_later(store, monkeypatch, owner, name, number):
    """A file server that is gone for a moment, or a process with too many mappings, says nothing about the bytes."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    shard = store.folder(LogprobCache(store, RULE).kind, add(LogprobCache(store, RULE), {key(1): [-1.0]}))
    memo = LogprobCache(store, RULE, pytest.fail)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse)
        with pytest.raises(UnreadableArtifact, match=rf"{shard}.* cannot be read: .*{os.strerror(number)}; "):
            memo.lookup(as_array(key(1)))
    assert shard.is_dir() and memo.lookup(as_array(key(1))).sums_Q.tolist() == [-1.0]


def test_tokens_are_verified_when_they_are_asked_for(store):
    """A lookup does not read them: they are nearly all of the bytes, and its answer does not depend on them."""
    memo = LogprobCache(store, RULE)
    broken = add(memo, {key(2): [-2.0, -3.0]})
    add(memo, {key(1): [-1.0]})
    damage_bit(store.folder(memo.kind, broken), "tokens.safetensors")
    said: list[str] = []
    reader = LogprobCache(store, RULE, said.append)
    assert reader.lookup(as_array(key(1), key(2))).sums_Q.tolist() == [-1.0, -5.0] and said == []
    assert reader.token_logprobs(key(2)) is None
    assert len(said) == 1 and "tokens.safetensors has sha256" in said[0]
    assert reader.lookup(as_array(key(1), key(2))).found_Q.tolist() == [True, False]
    add(memo, {key(2): [-2.0, -3.0]})
    assert reader.token_logprobs(key(2)).tolist() == [-2.0, -3.0]


def test_a_broken_copy_of_the_tokens_gives_way_to_a_whole_one(store):
    memo = LogprobCache(store, RULE)
    first, _ = made_in_turn(store, memo, *({key(1): [-1.0, -2.0], key(n): [-9.0]} for n in (2, 3)))
    damage_bit(store.folder(memo.kind, first), "tokens.safetensors")
    said: list[str] = []
    assert LogprobCache(store, RULE, said.append).token_logprobs(key(1)).tolist() == [-1.0, -2.0]
    assert len(said) == 1 and first in said[0]


def test_a_broken_shard_that_another_process_set_aside_is_forgotten(store):
    """Both had opened it; who is second finds nothing in its place, and has nothing to say."""
    writer = LogprobCache(store, RULE)
    broken = add(writer, {key(1): [-1.0]})
    said: list[list[str]] = [[], []]
    first, second = (LogprobCache(store, RULE, told.append) for told in said)
    assert first.lookup(as_array(key(1))).found_Q.all() and second.lookup(as_array(key(1))).found_Q.all()
    damage_bit(store.folder(writer.kind, broken), "tokens.safetensors")
    assert first.token_logprobs(key(1)) is None and second.token_logprobs(key(1)) is None
    assert [len(told) for told in said] == [1, 0]
    assert not second.lookup(as_array(key(1))).found_Q.any()


def test_sums_of_tails_are_those_of_the_tokens(store):
    """From any token on, of rows in several shards, the same row with several beginnings, against plain slices."""
    rng = np.random.default_rng(0)
    memo = LogprobCache(store, RULE)
    known: dict[bytes, list[float]] = {}
    for size in (40, 1, 17):
        rows = {rng.bytes(32): (-rng.random(rng.integers(0, 9))).astype(np.float32).tolist() for _ in range(size)}
        add(memo, rows)
        known |= rows
    asked = [k for k in known for _ in range(3)]
    starts = [int(rng.integers(0, len(known[k]) + 1)) for k in asked]
    expected = [math.fsum(known[k][start:]) for k, start in zip(asked, starts, strict=True)]
    found = memo.tail_sums(as_array(*asked, key(9)), np.array([*starts, 0]))
    assert found[:-1].tolist() == pytest.approx(expected, rel=1e-12) and math.isnan(found[-1])


def test_tails_in_a_broken_shard_are_unknown_unless_another_has_them(store):
    memo = LogprobCache(store, RULE)
    first, _ = made_in_turn(store, memo, *({key(1): [-1.0, -2.0], key(n): [-9.0]} for n in (2, 3)))
    damage_bit(store.folder(memo.kind, first), "tokens.safetensors")
    said: list[str] = []
    found = LogprobCache(store, RULE, said.append).tail_sums(as_array(key(1), key(2), key(3)), np.array([1, 0, 0]))
    assert found[0] == -2.0 and sorted(np.isnan(found[1:])) == [False, True]
    assert len(said) == 1 and "tokens.safetensors has sha256" in said[0]


def test_a_shard_is_opened_once_in_a_process(store):
    """A lookup asks for new shards only. To show it, one is damaged after it was opened: this process reads it no more."""
    memo = LogprobCache(store, RULE)
    name = add(memo, {key(1): [-1.0]})
    assert memo.lookup(as_array(key(1))).found_Q.all()
    (store.folder(memo.kind, name) / MANIFEST).write_text("{}")
    add(memo, {key(2): [-2.0]})
    assert memo.lookup(as_array(key(1), key(2))).found_Q.all()
    said: list[str] = []
    assert LogprobCache(store, RULE, said.append).lookup(as_array(key(1), key(2))).found_Q.tolist() == [False, True]
    assert len(said) == 1 and name in said[0]


def test_many_rows_in_many_shards_in_any_order(store):
    """More shards than rows in some, ragged tokens, keys in no order: against the plain dictionary."""
    rng = np.random.default_rng(0)
    memo = LogprobCache(store, RULE)
    known: dict[bytes, list[float]] = {}
    for size in (1, 0, 300, 2, 57):
        rows = {rng.bytes(32): rng.normal(size=rng.integers(0, 5)).astype(np.float32).tolist() for _ in range(size)}
        add(memo, rows)
        known |= rows
    asked = [*known, *(rng.bytes(32) for _ in range(100))]
    rng.shuffle(asked)
    hits = memo.lookup(as_array(*asked))
    assert hits.found_Q.tolist() == [k in known for k in asked]
    assert hits.counts_Q.tolist() == [len(known[k]) if k in known else -1 for k in asked]
    assert np.allclose(hits.sums_Q, [math.fsum(known[k]) if k in known else np.nan for k in asked], equal_nan=True)
    for k in asked[:40]:
        tokens = memo.token_logprobs(k)
        assert (tokens is None) == (k not in known) and (tokens is None or tokens.tolist() == known[k])


def test_a_million_unknown_keys_before_and_after_those_that_are_known(store):
    """More than are looked up at a time: 0.6 million, a known one, as many again, and the other."""
    memo, rng = LogprobCache(store, RULE), np.random.default_rng(0)
    add(memo, {key(1): [-1.0], key(2): [-2.0, -4.0]})
    unknown = rng.integers(256, size=(600_000, 32), dtype=np.uint8)
    asked = np.concatenate([unknown, as_array(key(1)), unknown[::-1], as_array(key(2))])
    hits, tails = memo.lookup(asked), memo.tail_sums(asked, np.ones(len(asked), np.int64))
    assert np.flatnonzero(hits.found_Q).tolist() == [600_000, 1_200_001]
    assert hits.sums_Q[hits.found_Q].tolist() == [-1.0, -6.0] and tails[hits.found_Q].tolist() == [0.0, -4.0]


PASS = """
import hashlib, sys
from pathlib import Path
import numpy as np
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.store import Store

memo = LogprobCache(Store(Path(sys.argv[1])), sys.argv[2])
keys = [hashlib.sha256(str(n).encode()).digest() for n in range(4000)]
known = memo.lookup(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)).found_Q
print("ready", flush=True)
missing = np.flatnonzero(~known)
for part in np.array_split(missing, range(10, len(missing), 10)):
    if len(part):
        own = np.frombuffer(b"".join(keys[n] for n in part), np.uint8).reshape(-1, 32)
        memo.add(own, np.ones(len(part), np.int32), -part.astype(np.float32))
        print(part[-1], flush=True)
"""


def test_a_scoring_pass_killed_at_random_keeps_what_it_committed(store):
    """Killed and started again, eight times, after none to five commits and somewhere in the next."""
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


def test_a_shard_that_holds_something_else_is_set_aside(store):
    """Published all right, hashes and all, but under another rule."""
    memo = LogprobCache(store, RULE)
    name = add(memo, {key(1): [-1.0]})
    foreign = LogprobCache(store, "f" * 64)
    other = add(foreign, {key(2): [-1.0]})
    shutil.copytree(store.folder(foreign.kind, other), store.folder(memo.kind, other))
    said: list[str] = []
    assert LogprobCache(store, RULE, said.append).lookup(as_array(key(1), key(2))).found_Q.tolist() == [True, False]
    assert len(said) == 1 and name[:12] not in said[0]


@pytest.mark.parametrize(
    ("sums", "words"),
    [(np.zeros(1), "arrays that do not fit each other"), (np.zeros(2, np.float32), "'sums': dtype('float32')")],
)
def test_a_shard_that_another_version_wrote_is_set_aside(store, sums, words):
    """Published all right too: two keys and counts, and one sum, or sums of another dtype."""
    memo = LogprobCache(store, RULE)
    with store.staging() as staging:
        index = {"keys": as_array(key(1), key(2)), "sums": sums, "counts": np.ones(2, np.int32)}
        save_file(index, staging / "index.safetensors")
        save_file({"tokens": np.zeros(2, np.float32)}, staging / "tokens.safetensors")
        store.publish(
            staging, Derivation(kind=memo.kind, code_version="9", inputs={}, settings={}), JobResult("d" * 64)
        )
    said: list[str] = []
    assert not LogprobCache(store, RULE, said.append).lookup(as_array(key(1), key(2))).found_Q.any()
    assert len(said) == 1 and words in said[0]


def test_numbers_that_are_not_finite_are_never_stored(store):
    with pytest.raises(AssertionError, match="not finite"):
        add(LogprobCache(store, RULE), {key(1): [float("nan")]})
    assert store.fingerprints(f"memo/{RULE}") == []


def test_the_memo_needs_no_torch():
    modules = ("training.contract.store.logprob_cache", "training.contract.store.logprob_table")
    loaded = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded]).returncode == 0
