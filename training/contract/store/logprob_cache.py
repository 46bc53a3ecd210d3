"""The log-prob cache: reference log-probs by sequence. Each sequence is scored once.

The log-prob of a sequence depends on the weights of the frozen model and on the algorithm. The fingerprint of both is the
*rule*. The shards (`logprob_shard.py`) are artifacts of the kind `memo/<rule>`; `shard_cache.py` finds them. All recipes
with one model share a cache: a rule does not depend on a recipe.

A lookup keeps sums and counts memory-mapped too.

Legend: S sequences, Q requested keys, N tokens, K bytes of a key.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.contract.errors import StoreError
from training.contract.identity.fingerprint import KEY_BYTES, fingerprint
from training.contract.identity.software import SCORING_VERSION
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.logprob_shard import (
    Counts,
    Floats,
    LogprobShard,
    TokenLogProbs,
    open_shard,
    write_shard,
)
from training.contract.store.manifest import Derivation
from training.contract.store.shard_cache import Keys, Rows, ShardCache, ShardDetails

_FORMAT = "2"


def scoring_rule(weights: str, dtype: str) -> str:
    """Return the fingerprint of the weights, the dtype and the scoring algorithm. Log-probs are valid under one rule."""
    return fingerprint("scoring_rule", {"weights": weights, "dtype": dtype, "version": SCORING_VERSION})


@dataclass(frozen=True)
class LookupResult:
    """The sums and counts of Q keys. A missing key has a false `found_Q`, a NaN sum and a count of -1."""

    found_Q: npt.NDArray[np.bool_]
    sums_Q: Floats
    counts_Q: Counts


@dataclass
class LogprobCache(ShardCache[LogprobShard]):
    """All cached log-probs of `rule`."""

    name = "memo"
    title = "log-prob cache"
    again = "score its sequences again"

    def open_shard(self, artifact: Artifact[ShardDetails]) -> LogprobShard:
        return open_shard(artifact)

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

    def add(self, keys_SK: Keys, counts_S: Counts, tokens_N: TokenLogProbs) -> Artifact[ShardDetails]:
        """Publish S sequences as one shard, with the log-probs of their tokens in one array. Raises StoreError."""
        assert keys_SK.shape == (len(counts_S), KEY_BYTES), f"{keys_SK.shape} keys for {len(counts_S)} counts"
        assert counts_S.sum() == len(tokens_N), f"counts for {counts_S.sum()} tokens, but {len(tokens_N)} log-probs"
        assert np.isfinite(tokens_N).all(), "a log-prob is not finite"
        with self.store.staging() as staging:
            identity = write_shard(staging, self.kind, keys_SK, counts_S, tokens_N)
            details = ShardDetails(sequences=len(counts_S), tokens=len(tokens_N), software=dict(self.software))
            derivation = Derivation(kind=self.kind, code_version=_FORMAT, inputs={}, settings={"shard": identity})
            return self.store.publish(staging, derivation, JobResult(identity, details)).of_kind(self.artifact_kind)
