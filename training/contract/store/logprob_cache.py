"""The log-prob cache: reference log-probs by sequence. Each sequence is scored once.

The log-prob of a sequence depends on the weights of the frozen model and on the algorithm. The fingerprint of both is the
*rule*. The cache of a rule is a set of immutable shards (`logprob_shard.py`), artifacts of the kind `memo/<rule>`. All recipes
with one model share a cache: a rule does not depend on a recipe.

Any number of processes may add shards at once. If several shards hold a sequence, the oldest wins, so a recomputed table has
the same bits. A corrupt shard is set aside with a note, and its sequences count as missing: a lost cache costs time, a wrong
one would cost a model.

A process hashes each shard's index once; later lookups open new shards only. Memory use is 16 bytes per sequence: the first 8
bytes of its key, sorted, and its row. Keys, sums and counts stay memory-mapped. Shards are never merged: the only cost of a
small shard is opening it once.

Legend: S sequences, Q requested keys, R requested keys without an answer yet, N tokens, K bytes of a key.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.contract.errors import StoreError
from training.contract.identity.fingerprint import KEY_BYTES, fingerprint, short
from training.contract.identity.software import SOFTWARE
from training.contract.store.logprob_shard import (
    Counts,
    Floats,
    Keys,
    LogprobShard,
    TokenLogProbs,
    key_prefixes,
    open_shard,
    write_shard,
)
from training.contract.store.manifest import Derivation
from training.contract.store.store import Artifact, JobResult, Store

Rows = npt.NDArray[np.int64]

# The version of the scoring algorithm (training.model). A new version makes all cached log-probs unused.
SCORING_VERSION = "shared-prefix-1"
_FORMAT = "2"
_BLOCK_KEYS = 1 << 20  # keys looked up at a time, to bound memory
_LOG = logging.getLogger(__name__)


def scoring_rule(weights: str, dtype: str) -> str:
    """Return the fingerprint of the weights, the dtype and the scoring algorithm. Log-probs are valid under one rule."""
    return fingerprint("scoring_rule", {"weights": weights, "dtype": dtype, "version": SCORING_VERSION})


@dataclass(frozen=True)
class LookupResult:
    """The sums and counts of Q keys. A missing key has a false `found_Q`, a NaN sum and a count of -1."""

    found_Q: npt.NDArray[np.bool_]
    sums_Q: Floats
    counts_Q: Counts


class _Index:
    """All rows of `shards`, sorted by key prefix, then by the order of the shards."""

    def __init__(self, shards: list[LogprobShard]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        prefixes_S = np.empty(self._starts[-1], np.uint64)
        for shard, start in zip(shards, self._starts, strict=False):
            prefixes_S[start : start + len(shard)] = key_prefixes(shard.keys_SK)
        self._rows_S: Rows = np.argsort(prefixes_S, kind="stable")
        self._prefixes_S = prefixes_S[self._rows_S]

    def find(self, keys_QK: Keys) -> Iterator[tuple[LogprobShard, Rows, Rows]]:
        """Yield, shard by shard, the rows with some of the keys, and the positions of these keys in `keys_QK`.

        Binary search on the prefix, then compare all 32 bytes. Rows with the same prefix are neighbours. So all unanswered
        keys advance by one row at a time, until they match or leave their prefix.
        """
        prefixes_Q = key_prefixes(keys_QK)
        open_R = np.argsort(prefixes_Q)  # sorted keys read the index in the order of memory
        at_R = np.searchsorted(self._prefixes_S, prefixes_Q[open_R])
        while True:
            inside_R = at_R < len(self._prefixes_S)
            open_R, at_R = open_R[inside_R], at_R[inside_R]
            same_R = self._prefixes_S[at_R] == prefixes_Q[open_R]
            open_R, at_R = open_R[same_R], at_R[same_R]
            if not len(open_R):
                return
            answered_R = np.zeros(len(open_R), np.bool_)
            for shard, rows, positions in self._group_by_shard(self._rows_S[at_R]):
                equal = (_as_uint64(shard.keys_SK[rows]) == _as_uint64(keys_QK[open_R[positions]])).all(axis=1)
                answered_R[positions] = equal
                yield shard, rows[equal], open_R[positions[equal]]
            open_R, at_R = open_R[~answered_R], at_R[~answered_R] + 1

    def _group_by_shard(self, rows_R: Rows) -> Iterator[tuple[LogprobShard, Rows, Rows]]:
        """Group rows of this index by shard: yield the shard, the rows in it, and their positions in `rows_R`."""
        shard_R = np.searchsorted(self._starts, rows_R, side="right") - 1
        narrowest = np.uint16 if len(self.shards) < 1 << 16 else np.uint32  # numpy's radix sort is for 16 bits
        order_R = np.argsort(shard_R.astype(narrowest), kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(shard_R, minlength=len(self.shards)))])
        for number in np.flatnonzero(np.diff(bounds)):
            positions = order_R[bounds[number] : bounds[number + 1]]
            yield self.shards[number], rows_R[positions] - self._starts[number], positions


@dataclass
class LogprobCache:
    """All cached log-probs of `rule`. `note` is called with a message for every shard set aside.

    `software`: the library versions and the device of this process, written beside the shards it adds.
    """

    store: Store
    rule: str
    note: Callable[[str], None] = _LOG.warning
    software: Mapping[str, str] = field(default_factory=dict)
    _shards: dict[str, LogprobShard] = field(default_factory=dict, init=False, repr=False)
    _index: _Index = field(default_factory=lambda: _Index([]), init=False, repr=False)

    @property
    def kind(self) -> str:
        return f"memo/{self.rule}"

    def lookup(self, keys_QK: Keys) -> LookupResult:
        """Look up `keys_QK`, uint8[Q, 32], also in new shards of other processes."""
        assert keys_QK.ndim == 2 and keys_QK.shape[1] == KEY_BYTES, (
            f"keys of shape {keys_QK.shape}, expected [Q, {KEY_BYTES}]"
        )
        self._refresh()
        sums_Q = np.full(len(keys_QK), np.nan)
        counts_Q = np.full(len(keys_QK), -1, dtype=np.int32)
        for shard, rows, positions in self._find(keys_QK):
            sums_Q[positions], counts_Q[positions] = shard.sums_S[rows], shard.counts_S[rows]
        return LookupResult(counts_Q >= 0, sums_Q, counts_Q)

    def tail_sums(self, keys_QK: Keys, starts_Q: Rows) -> Floats:
        """Return float64[Q], the sum of each key's log-probs from token `starts_Q[q]` on; NaN if the key is missing."""
        self._refresh()
        sums_Q = np.full(len(keys_QK), np.nan)
        for shard, rows, positions in self._find(keys_QK):
            try:
                sums_Q[positions] = shard.tail_sums(rows, starts_Q[positions])
            except StoreError as error:
                self._drop(shard, error)
                return self.tail_sums(keys_QK, starts_Q)  # another shard may have the same sequences
        return sums_Q

    def token_logprobs(self, key: bytes) -> TokenLogProbs | None:
        """Return the log-probs of the response tokens of one sequence, for inspection; None if it is missing."""
        self._refresh()
        keys_1K = np.frombuffer(key, dtype=np.uint8)[None, :]
        for shard, rows, _ in self._index.find(keys_1K):
            if not len(rows):  # only the prefix is the same
                continue
            try:
                return shard.token_logprobs(int(rows[0]))
            except StoreError as error:
                self._drop(shard, error)
                return self.token_logprobs(key)  # another shard may have the same sequence
        return None

    def computed_by_other_software(self, keys_QK: Keys) -> npt.NDArray[np.bool_]:
        """Return bool[Q]: whether other software, or another device, computed the log-probs of each key."""
        self._refresh()
        is_other_Q = np.zeros(len(keys_QK), np.bool_)
        for shard, _, positions in self._find(keys_QK):
            is_other_Q[positions] = self._is_by_other_software(shard)
        return is_other_Q

    def set_aside_computed_by_other_software(self, why: str) -> None:
        """Set aside every shard of other software, or of another device. The note ends with `why`."""
        self._refresh()
        for shard in [shard for shard in self._shards.values() if self._is_by_other_software(shard)]:
            self._drop(shard, StoreError(why, "other-software"))

    def add(self, keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> Artifact:
        """Publish S sequences as one shard, with the log-probs of their tokens in one array. Raises StoreError."""
        assert keys_SK.shape == (len(counts_S), KEY_BYTES), f"{keys_SK.shape} keys for {len(counts_S)} counts"
        assert counts_S.sum() == len(tokens_N), f"counts for {counts_S.sum()} tokens, but {len(tokens_N)} log-probs"
        assert np.isfinite(tokens_N).all(), "a log-prob is not finite"
        with self.store.staging() as staging:
            identity = write_shard(staging, self.kind, keys_SK, counts_S, tokens_N)
            details = {"sequences": len(counts_S), "tokens": len(tokens_N), SOFTWARE: dict(self.software)}
            derivation = Derivation(kind=self.kind, code_version=_FORMAT, inputs={}, settings={"shard": identity})
            return self.store.publish(staging, derivation, JobResult(identity, details))

    def _is_by_other_software(self, shard: LogprobShard) -> bool:
        """Return whether other software made the shard. Shards of older versions name no device, so they count as other."""
        return bool(shard.artifact.details.get(SOFTWARE) != self.software)

    def _find(self, keys_QK: Keys) -> Iterator[tuple[LogprobShard, Rows, Rows]]:
        """Run `_Index.find` on one block of keys at a time."""
        for begin in range(0, len(keys_QK), _BLOCK_KEYS):
            for shard, rows, positions in self._index.find(keys_QK[begin : begin + _BLOCK_KEYS]):
                yield shard, rows, begin + positions

    def _refresh(self) -> None:
        """Open new shards. Opened shards are immutable and stay."""
        new = [name for name in self.store.fingerprints(self.kind) if name not in self._shards]
        opened = {name: shard for name in new if (shard := self._open(name)) is not None}
        if opened:
            self._shards |= opened
            self._build_index()

    def _build_index(self) -> None:
        self._index = _Index(sorted(self._shards.values(), key=lambda shard: shard.age))

    def _open(self, name: str) -> LogprobShard | None:
        """Open and verify a shard; set it aside and return None if it is corrupt."""
        try:
            return open_shard(self.store.open(self.kind, name, hashes=False))
        except StoreError as error:
            self._set_aside(name, error)
            return None

    def _drop(self, shard: LogprobShard, error: StoreError) -> None:
        """Set an open shard aside and remove it from the index."""
        self._set_aside(shard.artifact.fingerprint, error)
        del self._shards[shard.artifact.fingerprint]
        self._build_index()

    def _set_aside(self, name: str, error: StoreError) -> None:
        try:
            path = self.store.set_aside(self.kind, name)
        except FileNotFoundError:  # another process has set it aside
            return
        self.note(
            f"set aside shard {short(name)} of the log-prob cache in {path}, to score its sequences again: {error}"
        )


def _as_uint64(keys: Keys) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)
