"""The memo: reference log-probs, a sequence a row, each scored once and then never again.

A frozen model gives one and the same log-prob to a sequence as long as the weights and the way of scoring stay as they
are. The fingerprint of both is the *rule*, and everything known under a rule is a set of immutable shards (`shard.py`) in
the store, under the kind `memo/<rule>`. No recipe is part of a rule: all recipes over one model share what is known.

Shards are only ever added, by any number of processes at once. The same sequence may be in several; the oldest shard
wins, so that a table made again holds the same bits. A shard that is not what was published is set aside, said so, and
its sequences count as missing: losing a cache costs time, believing a broken one costs a model.

A shard's index is hashed once in a process, when it is first seen; a lookup then asks for new shards only. Held in memory
are 16 bytes a sequence: the first 8 of each key, sorted, and where the row is. Keys, sums and counts stay memory-mapped. There
is nothing to compact: what many small shards cost is opening each of them once.

Legend: S sequences, Q keys asked for, R of them still without an answer.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.contract.errors import StoreError
from training.contract.fingerprint import fingerprint, short
from training.contract.manifest import Derivation
from training.contract.shard import KEY_BYTES, Counts, Floats, Keys, Shard, TokenLogProbs, open_shard, write_shard
from training.contract.store import Artifact, Made, Store

Places = npt.NDArray[np.int64]

_FORMAT = "2"
_BLOCK_KEYS = 1 << 20  # keys looked up at a time, which bounds the memory that takes
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


class _Index:
    """All rows of `shards`, in the order of their prefixes; among equal prefixes the first shard's come first."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        prefixes_S = np.empty(self._starts[-1], np.uint64)
        for shard, start in zip(shards, self._starts, strict=False):
            prefixes_S[start : start + len(shard)] = _prefixes(shard.keys_SK)
        self._places_S: Places = np.argsort(prefixes_S, kind="stable")
        self._prefixes_S = prefixes_S[self._places_S]

    def find(self, keys_QK: Keys) -> Places:
        """For each key the place of its row, counted over all shards, or -1.

        A binary search on the prefix, then all 32 bytes are compared. Rows that share a prefix lie side by side, so keys
        still unanswered move on by one row together, until they find their own or leave their prefix.
        """
        wanted_Q = _prefixes(keys_QK)
        found_Q = np.full(len(keys_QK), -1, dtype=np.int64)
        open_R = np.argsort(wanted_Q)  # sorted keys walk through the index once, in the order of memory
        at_R = np.searchsorted(self._prefixes_S, wanted_Q[open_R])
        while True:
            inside_R = at_R < len(self._prefixes_S)
            open_R, at_R = open_R[inside_R], at_R[inside_R]
            same_R = self._prefixes_S[at_R] == wanted_Q[open_R]
            open_R, at_R = open_R[same_R], at_R[same_R]
            if not len(open_R):
                return found_Q
            places_R = self._places_S[at_R]
            equal_R = self._holds(places_R, keys_QK[open_R])
            found_Q[open_R[equal_R]] = places_R[equal_R]
            open_R, at_R = open_R[~equal_R], at_R[~equal_R] + 1

    def by_shard(self, places_R: Places) -> Iterator[tuple[Shard, Places, Places]]:
        """Each shard that has some of the places, with their rows in it and which of the R places they are."""
        order_R = np.argsort(places_R, kind="stable")
        bounds = np.searchsorted(places_R, self._starts, sorter=order_R)
        for number in np.flatnonzero(np.diff(bounds)):
            those = order_R[bounds[number] : bounds[number + 1]]
            yield self.shards[number], places_R[those] - self._starts[number], those

    def _holds(self, places_R: Places, keys_RK: Keys) -> npt.NDArray[np.bool_]:
        equal_R = np.empty(len(places_R), np.bool_)
        for shard, rows, those in self.by_shard(places_R):
            equal_R[those] = (_words(shard.keys_SK[rows]) == _words(keys_RK[those])).all(axis=1)
        return equal_R


@dataclass
class Memo:
    """Everything known under `rule`. `note` is told, in a sentence, of every shard that had to be set aside."""

    store: Store
    rule: str
    note: Callable[[str], None] = _LOG.warning
    _shards: dict[str, Shard] = field(default_factory=dict, init=False, repr=False)
    _index: _Index = field(default_factory=lambda: _Index([]), init=False, repr=False)

    @property
    def kind(self) -> str:
        return f"memo/{self.rule}"

    def lookup(self, keys_QK: Keys) -> Hits:
        """What is known of `keys_QK`, uint8[Q, 32], shards that other processes have added since included."""
        assert keys_QK.ndim == 2 and keys_QK.shape[1] == KEY_BYTES, (
            f"keys of shape {keys_QK.shape}, expected [Q, {KEY_BYTES}]"
        )
        self._refresh()
        sums_Q = np.full(len(keys_QK), np.nan)
        counts_Q = np.full(len(keys_QK), -1, dtype=np.int32)
        for begin in range(0, len(keys_QK), _BLOCK_KEYS):
            places = self._index.find(keys_QK[begin : begin + _BLOCK_KEYS])
            known = np.flatnonzero(places >= 0)
            for shard, rows, those in self._index.by_shard(places[known]):
                sums_Q[begin + known[those]] = shard.sums_S[rows]
                counts_Q[begin + known[those]] = shard.counts_S[rows]
        return Hits(counts_Q >= 0, sums_Q, counts_Q)

    def token_logprobs(self, key: bytes) -> TokenLogProbs | None:
        """The log-prob of every response token of one sequence, for inspection; None if it was never scored."""
        self._refresh()
        while (place := self._index.find(np.frombuffer(key, dtype=np.uint8)[None, :]))[0] >= 0:
            shard, rows, _ = next(self._index.by_shard(place))
            try:
                return shard.token_logprobs(int(rows[0]))
            except StoreError as error:
                name = shard.artifact.fingerprint
                self._set_aside(name, error)
                del self._shards[name]
                self._order()
        return None

    def add(self, keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> Artifact:
        """Publish one shard: S sequences, the log-probs of their tokens one after the other. Raises StoreError."""
        assert keys_SK.shape == (len(counts_S), KEY_BYTES), f"{keys_SK.shape} keys for {len(counts_S)} counts"
        assert counts_S.sum() == len(tokens_N), f"{counts_S.sum()} tokens counted, {len(tokens_N)} given"
        assert np.isfinite(tokens_N).all(), "a log-prob that is not finite is never stored"
        with self.store.staging() as staging:
            identity = write_shard(staging, self.kind, keys_SK, counts_S, tokens_N)
            made = Made(identity, {"sequences": len(counts_S), "tokens": len(tokens_N)})
            derivation = Derivation(kind=self.kind, code_version=_FORMAT, inputs={}, settings={"shard": identity})
            return self.store.publish(staging, derivation, made)

    def _refresh(self) -> None:
        """Open the shards that were added since the last time; those opened before are immutable and stay."""
        new = [name for name in self.store.fingerprints(self.kind) if name not in self._shards]
        opened = {name: shard for name in new if (shard := self._open(name)) is not None}
        if opened:
            self._shards |= opened
            self._order()

    def _order(self) -> None:
        self._index = _Index(sorted(self._shards.values(), key=lambda shard: shard.age))

    def _open(self, name: str) -> Shard | None:
        """The verified shard; None if it is broken, and then it is out of the way."""
        try:
            return open_shard(self.store.open(self.kind, name, hashes=False))
        except StoreError as error:
            self._set_aside(name, error)
            return None

    def _set_aside(self, name: str, error: StoreError) -> None:
        try:
            place = self.store.set_aside(self.kind, name)
        except FileNotFoundError:  # another process found it broken as well, and was first
            return
        self.note(
            f"set aside shard {short(name)} of the memo: {error}. "
            f"Its sequences are scored again; the shard is kept in {place}"
        )


def _prefixes(keys: Keys) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of each key as a big-endian number, which keeps the order of keys.

    Among fair hashes that is nearly always enough to tell two keys apart.
    """
    return np.ascontiguousarray(keys[:, :8]).view(">u8")[:, 0].astype(np.uint64)


def _words(keys: Keys) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)
