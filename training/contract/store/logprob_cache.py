"""The memo: reference log-probs, a row a sequence, each scored only once.

The log-prob of a sequence under a frozen model is the same as long as weights and algorithm are. The fingerprint of both is
the *rule*, and what is known under a rule is a set of immutable shards (`logprob_shard.py`) in the store, of the kind
`memo/<rule>`. No recipe is part of a rule: all recipes over one model share its memo.

Shards are only ever added, by any number of processes at once. The same sequence may be in several; the oldest shard wins, so
that a table made again has the same bits. A corrupt shard is set aside with a note, and its sequences count as missing: a
lost cache costs time, a wrong one would cost a model.

A shard's index is hashed once in a process, when it is first seen; later lookups open new shards only. In memory are 16 bytes
a sequence: the first 8 of its key, sorted, and its row. Keys, sums and counts stay memory-mapped. Shards are never merged:
many small ones cost no more than opening each once.

Legend: S sequences, Q keys asked for, R of them still without an answer.
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

# The version of the algorithm that scores sequences (training.model): with another one no log-prob is used again.
SCORING_VERSION = "shared-prefix-1"
_FORMAT = "2"
_BLOCK_KEYS = 1 << 20  # keys looked up at a time, which bounds the memory that takes
_LOG = logging.getLogger(__name__)


def scoring_rule(weights: str, dtype: str) -> str:
    """The rule under which log-probs stay valid: the weights' fingerprint, the dtype, the version of the algorithm."""
    return fingerprint("scoring_rule", {"weights": weights, "dtype": dtype, "version": SCORING_VERSION})


@dataclass(frozen=True)
class LookupResult:
    """The answers for Q keys. Where `found_Q` is false, the sum is NaN and the count is -1."""

    found_Q: npt.NDArray[np.bool_]
    sums_Q: Floats
    counts_Q: Counts


class _Index:
    """All rows of `shards`, in the order of their prefixes; among equal prefixes the first shard's come first."""

    def __init__(self, shards: list[LogprobShard]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        prefixes_S = np.empty(self._starts[-1], np.uint64)
        for shard, start in zip(shards, self._starts, strict=False):
            prefixes_S[start : start + len(shard)] = key_prefixes(shard.keys_SK)
        self._places_S: Rows = np.argsort(prefixes_S, kind="stable")
        self._prefixes_S = prefixes_S[self._places_S]

    def find(self, keys_QK: Keys) -> Iterator[tuple[LogprobShard, Rows, Rows]]:
        """Yields for each shard its rows that belong to some of the keys, and which of the Q keys they are.

        A binary search on the prefix, then a comparison of all 32 bytes. Rows with the same prefix are neighbours, so keys
        without an answer move on by one row together, until they find their own or leave their prefix.
        """
        wanted_Q = key_prefixes(keys_QK)
        open_R = np.argsort(wanted_Q)  # sorted keys walk through the index once, in the order of memory
        at_R = np.searchsorted(self._prefixes_S, wanted_Q[open_R])
        while True:
            inside_R = at_R < len(self._prefixes_S)
            open_R, at_R = open_R[inside_R], at_R[inside_R]
            same_R = self._prefixes_S[at_R] == wanted_Q[open_R]
            open_R, at_R = open_R[same_R], at_R[same_R]
            if not len(open_R):
                return
            answered_R = np.zeros(len(open_R), np.bool_)
            for shard, rows, which in self._by_shard(self._places_S[at_R]):
                equal = (_words(shard.keys_SK[rows]) == _words(keys_QK[open_R[which]])).all(axis=1)
                answered_R[which] = equal
                yield shard, rows[equal], open_R[which[equal]]
            open_R, at_R = open_R[~answered_R], at_R[~answered_R] + 1

    def _by_shard(self, places_R: Rows) -> Iterator[tuple[LogprobShard, Rows, Rows]]:
        """Each shard that has some of the places, with their rows in it, and which of the R places they are."""
        shard_R = np.searchsorted(self._starts, places_R, side="right") - 1
        narrowest = np.uint16 if len(self.shards) < 1 << 16 else np.uint32  # numpy's radix sort is for 16 bits
        order_R = np.argsort(shard_R.astype(narrowest), kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(shard_R, minlength=len(self.shards)))])
        for number in np.flatnonzero(np.diff(bounds)):
            which = order_R[bounds[number] : bounds[number + 1]]
            yield self.shards[number], places_R[which] - self._starts[number], which


@dataclass
class LogprobCache:
    """All log-probs known under `rule`. `note` gets a sentence for every shard that is set aside.

    `software`: the versions and the device by which shards are made that are added; they are written beside them.
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
        """Look up `keys_QK`, uint8[Q, 32], also in shards that other processes have added meanwhile."""
        assert keys_QK.ndim == 2 and keys_QK.shape[1] == KEY_BYTES, (
            f"keys of shape {keys_QK.shape}, expected [Q, {KEY_BYTES}]"
        )
        self._refresh()
        sums_Q = np.full(len(keys_QK), np.nan)
        counts_Q = np.full(len(keys_QK), -1, dtype=np.int32)
        for shard, rows, which in self._found(keys_QK):
            sums_Q[which], counts_Q[which] = shard.sums_S[rows], shard.counts_S[rows]
        return LookupResult(counts_Q >= 0, sums_Q, counts_Q)

    def tail_sums(self, keys_QK: Keys, starts_Q: Rows) -> Floats:
        """For each key the sum of its log-probs from token number `starts_Q[q]` on; NaN where it is not known."""
        self._refresh()
        sums_Q = np.full(len(keys_QK), np.nan)
        for shard, rows, which in self._found(keys_QK):
            try:
                sums_Q[which] = shard.tail_sums(rows, starts_Q[which])
            except StoreError as error:
                self._drop(shard, error)
                return self.tail_sums(keys_QK, starts_Q)  # another shard may have the same
        return sums_Q

    def token_logprobs(self, key: bytes) -> TokenLogProbs | None:
        """The log-prob of every response token of one sequence, for inspection; None if it was never scored."""
        self._refresh()
        wanted = np.frombuffer(key, dtype=np.uint8)[None, :]
        for shard, rows, _ in self._index.find(wanted):
            if not len(rows):  # only the first 8 bytes of the key are the same
                continue
            try:
                return shard.token_logprobs(int(rows[0]))
            except StoreError as error:
                self._drop(shard, error)
                return self.token_logprobs(key)  # another shard may have the same
        return None

    def computed_by_other_software(self, keys_QK: Keys) -> npt.NDArray[np.bool_]:
        """Return which of the Q keys are known only from shards that other software, or another device, made."""
        self._refresh()
        others_Q = np.zeros(len(keys_QK), np.bool_)
        for shard, _, which in self._found(keys_QK):
            others_Q[which] = self._is_of_others(shard)
        return others_Q

    def set_aside_computed_by_other_software(self, why: str) -> None:
        """Set aside every shard that other software, or another device, made; `why` is told."""
        self._refresh()
        for shard in [shard for shard in self._shards.values() if self._is_of_others(shard)]:
            self._drop(shard, StoreError(why))

    def add(self, keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> Artifact:
        """Publish one shard: S sequences, the log-probs of their tokens one after the other. Raises StoreError."""
        assert keys_SK.shape == (len(counts_S), KEY_BYTES), f"{keys_SK.shape} keys for {len(counts_S)} counts"
        assert counts_S.sum() == len(tokens_N), f"{counts_S.sum()} tokens counted, {len(tokens_N)} given"
        assert np.isfinite(tokens_N).all(), "a log-prob that is not finite is never stored"
        with self.store.staging() as staging:
            identity = write_shard(staging, self.kind, keys_SK, counts_S, tokens_N)
            about = {"sequences": len(counts_S), "tokens": len(tokens_N), SOFTWARE: dict(self.software)}
            made = JobResult(identity, about)
            derivation = Derivation(kind=self.kind, code_version=_FORMAT, inputs={}, settings={"shard": identity})
            return self.store.publish(staging, derivation, made)

    def _is_of_others(self, shard: LogprobShard) -> bool:
        """Older shards do not say by which device they were made."""
        return bool(shard.artifact.details.get(SOFTWARE) != self.software)

    def _found(self, keys_QK: Keys) -> Iterator[tuple[LogprobShard, Rows, Rows]]:
        """`_Index.find`, a block of keys at a time."""
        for begin in range(0, len(keys_QK), _BLOCK_KEYS):
            for shard, rows, which in self._index.find(keys_QK[begin : begin + _BLOCK_KEYS]):
                yield shard, rows, begin + which

    def _refresh(self) -> None:
        """Open the shards that were added since the last time; those opened before are immutable and stay."""
        new = [name for name in self.store.fingerprints(self.kind) if name not in self._shards]
        opened = {name: shard for name in new if (shard := self._open(name)) is not None}
        if opened:
            self._shards |= opened
            self._order()

    def _order(self) -> None:
        self._index = _Index(sorted(self._shards.values(), key=lambda shard: shard.age))

    def _open(self, name: str) -> LogprobShard | None:
        """The verified shard; None if it is corrupt, after setting it aside."""
        try:
            return open_shard(self.store.open(self.kind, name, hashes=False))
        except StoreError as error:
            self._set_aside(name, error)
            return None

    def _drop(self, shard: LogprobShard, error: StoreError) -> None:
        """Set an open shard aside and forget it."""
        self._set_aside(shard.artifact.fingerprint, error)
        del self._shards[shard.artifact.fingerprint]
        self._order()

    def _set_aside(self, name: str, error: StoreError) -> None:
        try:
            place = self.store.set_aside(self.kind, name)
        except FileNotFoundError:  # another process found it broken as well, and was first
            return
        self.note(
            f"set aside shard {short(name)} of the memo: {error}. "
            f"Its sequences are scored again; the shard is kept in {place}"
        )


def _words(keys: Keys) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)
