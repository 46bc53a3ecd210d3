"""The memo: reference log-probs, a sequence a row, each scored once and then never again.

A frozen model gives one and the same log-prob to a sequence as long as the weights and the way of scoring stay as they
are. The fingerprint of both is the *rule*, and everything known under a rule is a set of immutable shards in the store,
under the kind `memo/<rule>`. A shard is one safetensors file:

    keys    uint8[S, 32]    sha256 of the token ids and mask of a sequence
    sums    float64[S]      summed log-prob of its response tokens, in nats
    counts  int32[S]        how many tokens those are
    offsets int64[S + 1]    where the log-probs of its tokens begin in `tokens`
    tokens  float32[N]      the log-probs themselves

Shards are only ever added, by any number of processes at once. The same sequence may be in several; the oldest shard
wins, so that a table made again holds the same bits. A shard that is not what was published is set aside, said so, and
its sequences count as missing: losing a cache costs time, believing a broken one costs a model.

Legend: S sequences, N tokens of all of them, Q keys asked for.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from training.contract.errors import CorruptArtifact, StoreError
from training.contract.fingerprint import fingerprint, fingerprint_of_stream, short
from training.contract.manifest import Derivation
from training.contract.store import Artifact, Made, Store

Array = npt.NDArray[np.generic]
Keys = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]
TokenLogProbs = npt.NDArray[np.float32]

KEY_BYTES = 32
_PREFIX_BYTES = 8
_FILE = "shard.safetensors"
_FORMAT = "1"
_DTYPES = {"keys": np.uint8, "sums": np.float64, "counts": np.int32, "offsets": np.int64}
_LOG = logging.getLogger(__name__)


def scoring_rule(weights: str, dtype: str, version: str) -> str:
    """The rule under which log-probs stay valid: the weights' fingerprint, the dtype, the version of the algorithm."""
    return fingerprint("scoring_rule", {"weights": weights, "dtype": dtype, "version": version})


@dataclass(frozen=True)
class Hits:
    """What is known of Q keys. Where `found_Q` is false, the sum is NaN and the count is -1."""

    found_Q: npt.NDArray[np.bool_]
    sums_Q: Floats
    counts_Q: Counts


@dataclass(frozen=True)
class _Shard:
    file: Path
    created: str
    keys: Keys
    sums: Floats
    counts: Counts
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Index:
    """All rows of all shards, in the order of `prefixes`; among equal prefixes the oldest shard's come first."""

    prefixes: npt.NDArray[np.uint64]
    keys: Keys
    sums: Floats
    counts: Counts
    shard: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


@dataclass
class Memo:
    """Everything known under `rule`. `note` is told, in a sentence, of every shard that had to be set aside."""

    store: Store
    rule: str
    note: Callable[[str], None] = _LOG.warning
    _shards: dict[str, _Shard] = field(default_factory=dict, init=False, repr=False)
    _ordered: list[_Shard] = field(default_factory=list, init=False, repr=False)
    _index: _Index = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._index = _build_index([])

    @property
    def kind(self) -> str:
        return f"memo/{self.rule}"

    def lookup(self, keys_QK: Keys) -> Hits:
        """What is known of `keys_QK`, uint8[Q, 32], shards that other processes have added since included."""
        self._refresh()
        places_Q = _find(self._index, keys_QK)
        found_Q = places_Q >= 0
        sums_Q = np.full(len(keys_QK), np.nan)
        counts_Q = np.full(len(keys_QK), -1, dtype=np.int32)
        sums_Q[found_Q] = self._index.sums[places_Q[found_Q]]
        counts_Q[found_Q] = self._index.counts[places_Q[found_Q]]
        return Hits(found_Q, sums_Q, counts_Q)

    def token_logprobs(self, key: bytes) -> TokenLogProbs | None:
        """The log-prob of every response token of one sequence, for inspection; None if it was never scored."""
        self._refresh()
        place = int(_find(self._index, np.frombuffer(key, dtype=np.uint8)[None, :])[0])
        if place < 0:
            return None
        shard, row = self._ordered[self._index.shard[place]], self._index.row[place]
        begin, end = shard.offsets[row], shard.offsets[row + 1]
        if begin == end:
            return np.empty(0, np.float32)
        with safe_open(shard.file, framework="numpy") as file:
            tokens: TokenLogProbs = file.get_slice("tokens")[begin:end]
        return tokens

    def add(self, keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> Artifact:
        """Publish one shard: S sequences, the log-probs of their tokens one after the other. Gives the shard.

        The sums are taken here, in float64, so that they cannot disagree with the tokens.
        """
        assert keys_SK.shape == (len(counts_S), KEY_BYTES), f"{keys_SK.shape} keys for {len(counts_S)} counts"
        assert counts_S.sum() == len(tokens_N), f"{counts_S.sum()} tokens counted, {len(tokens_N)} given"
        assert np.isfinite(tokens_N).all(), "a log-prob that is not finite is never stored"
        tensors = _tensors(keys_SK, counts_S, tokens_N)
        identity = fingerprint_of_stream(self.kind, (tensors[name].tobytes() for name in sorted(tensors)))
        made = Made(identity, {"sequences": len(counts_S), "tokens": len(tokens_N)})
        derivation = Derivation(kind=self.kind, code_version=_FORMAT, inputs={}, settings={"shard": identity})
        with self.store.staging() as staging:
            save_file(tensors, staging / _FILE)
            return self.store.publish(staging, derivation, made)

    def _refresh(self) -> None:
        """Read the shards that were added since the last time; those read before are immutable and stay."""
        new = [name for name in self.store.fingerprints(self.kind) if name not in self._shards]
        read = {name: shard for name in new if (shard := self._read(name)) is not None}
        if read:
            self._shards |= read
            self._ordered = [self._shards[name] for name in sorted(self._shards, key=self._age)]
            self._index = _build_index(self._ordered)

    def _age(self, name: str) -> tuple[str, str]:
        return self._shards[name].created, name

    def _read(self, name: str) -> _Shard | None:
        """The verified shard; None if it is broken, and then it is out of the way."""
        try:
            return _read_shard(self.store.open(self.kind, name))
        except StoreError as error:
            try:
                place = self.store.set_aside(self.kind, name)
            except FileNotFoundError:  # another process found it broken as well, and was first
                return None
            self.note(
                f"set aside shard {short(name)} of the memo: {error}. "
                f"Its sequences are scored again; the shard is kept in {place}"
            )
            return None


def _tensors(keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> dict[str, Array]:
    owners_N = np.repeat(np.arange(len(counts_S)), counts_S)
    return {
        "keys": np.ascontiguousarray(keys_SK, dtype=np.uint8),
        "sums": np.bincount(owners_N, weights=tokens_N.astype(np.float64), minlength=len(counts_S)).astype(np.float64),
        "counts": np.ascontiguousarray(counts_S, dtype=np.int32),
        "offsets": np.concatenate([[0], np.cumsum(counts_S, dtype=np.int64)]),
        "tokens": np.ascontiguousarray(tokens_N, dtype=np.float32),
    }


def _read_shard(artifact: Artifact) -> _Shard:
    """The shard without its tokens, which stay on the disk. Raises CorruptArtifact if it has not the form of one."""
    path = artifact.folder / _FILE
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in _DTYPES}
            tokens = file.get_slice("tokens").get_shape()
    except (OSError, SafetensorError) as error:
        raise CorruptArtifact(f"{path} is not a shard of log-probs: {error}") from error
    rows = len(arrays["counts"])
    shapes = {"keys": (rows, KEY_BYTES), "sums": (rows,), "counts": (rows,), "offsets": (rows + 1,)}
    well_formed = all(arrays[name].shape == shapes[name] and arrays[name].dtype == _DTYPES[name] for name in shapes)
    if not (well_formed and np.array_equal(np.diff(arrays["offsets"]), arrays["counts"])):
        raise CorruptArtifact(f"{path} has arrays that do not fit each other")
    if list(tokens) != [arrays["offsets"][-1]]:
        raise CorruptArtifact(f"{path} has {tokens} tokens, expected {arrays['offsets'][-1]}")
    return _Shard(path, artifact.manifest.created, **arrays)


def _build_index(shards: list[_Shard]) -> _Index:
    keys = np.concatenate([np.empty((0, KEY_BYTES), np.uint8), *(s.keys for s in shards)])
    prefixes = _prefixes(keys)
    order = np.argsort(prefixes, kind="stable")
    sizes = [len(s.counts) for s in shards]
    return _Index(
        prefixes=prefixes[order],
        keys=keys[order],
        sums=np.concatenate([np.empty(0), *(s.sums for s in shards)])[order],
        counts=np.concatenate([np.empty(0, np.int32), *(s.counts for s in shards)])[order],
        shard=np.repeat(np.arange(len(shards)), sizes)[order],
        row=np.concatenate([np.empty(0, np.int64), *(np.arange(size) for size in sizes)])[order],
    )


def _prefixes(keys: Keys) -> npt.NDArray[np.uint64]:
    """The first 8 bytes as a big-endian number: among fair hashes nearly always enough to tell two keys apart."""
    return np.ascontiguousarray(keys[:, :_PREFIX_BYTES]).view(">u8")[:, 0].astype(np.uint64)


def _find(index: _Index, keys_QK: Keys) -> npt.NDArray[np.int64]:
    """For each key its place in the index, or -1.

    A binary search on the prefix, then all 32 bytes are compared. Keys that share a prefix lie side by side, so those
    still unanswered move on by one row together, until they find their key or leave their prefix.
    """
    assert keys_QK.ndim == 2 and keys_QK.shape[1] == KEY_BYTES, (
        f"keys of shape {keys_QK.shape}, expected [Q, {KEY_BYTES}]"
    )
    wanted_Q = _prefixes(keys_QK)
    places_Q = np.full(len(keys_QK), -1, dtype=np.int64)
    place = np.searchsorted(index.prefixes, wanted_Q)
    open_ = np.arange(len(keys_QK))
    while True:
        inside = place < len(index.prefixes)
        open_, place = open_[inside], place[inside]
        same_prefix = index.prefixes[place] == wanted_Q[open_]
        open_, place = open_[same_prefix], place[same_prefix]
        if not len(open_):
            return places_Q
        equal = (index.keys[place] == keys_QK[open_]).all(axis=1)
        places_Q[open_[equal]] = place[equal]
        open_, place = open_[~equal], place[~equal] + 1
