"""Score the sequences that the log-prob cache lacks, divided among the ranks.

Pairs share responses and data sets share pairs, so each distinct sequence is scored once, by its key. A batch holds all
responses to a prompt. The ranks take the batches in turn, so their parts are disjoint and cost nearly the same. Each rank
commits its own shards every half minute, so a killed job loses no more than that.

Legend: P pairs, S distinct sequences, M missing ones, K bytes of a key.
"""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.contract.errors import TrainingError
from training.contract.identity.fingerprint import KEY_BYTES
from training.contract.protocol.events import EventWriter, Progress
from training.contract.protocol.input_files import check_inputs_unchanged
from training.contract.store.logprob_cache import LogprobCache
from training.data.tokenization.pair_dataset import SIDES, Pairs, Side
from training.distributed import Group
from training.model.attention.shared_prefix import TokenSequence
from training.model.logprobs.batch_scoring import Batch, Prompts, score_in_rounds, shared_batches
from training.model.logprobs.response_logprobs import LogProbs

COMMIT_SECONDS = 30.0
_COMMIT_TOKENS = 1 << 24  # 64 MiB of log-probs


@dataclass(frozen=True)
class DistinctSequences:
    """The distinct sequences of all pairs, in the order of their keys.

    The 2P responses have places: first the chosen responses of all pairs, then the rejected ones. `first_S` is the first place
    of each sequence, `sequence_2P` the sequence at each place.
    """

    pairs: Pairs
    keys_SK: npt.NDArray[np.uint8]
    lengths_S: npt.NDArray[np.int64]
    first_S: npt.NDArray[np.int64]
    sequence_2P: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Pairs) -> "DistinctSequences":
        keys_2PK = np.concatenate([pairs.keys(side) for side in SIDES])
        keys_2P = keys_2PK.view(np.dtype((np.void, KEY_BYTES)))[:, 0]  # one comparison per key, not per byte
        _, first_S, sequence_2P = np.unique(keys_2P, return_index=True, return_inverse=True)
        lengths_2P = np.concatenate([pairs.lengths(side) for side in SIDES])
        return cls(pairs, keys_2PK[first_S], lengths_2P[first_S], first_S, sequence_2P)

    def __len__(self) -> int:
        return len(self.keys_SK)

    def where(self, sequence: int) -> tuple[int, Side]:
        """Return the first pair with this sequence, and its side."""
        side, pair = divmod(int(self.first_S[sequence]), len(self.pairs))
        return pair, SIDES[side]

    def read(self, sequence: int) -> TokenSequence:
        return self.pairs.sequence(*self.where(sequence))

    def prompts(self, some_M: npt.NDArray[np.int64]) -> Prompts:
        """Return the prompt of each of these sequences, from its first pair."""
        pairs_M = self.first_S[some_M] % len(self.pairs)
        return Prompts(self.pairs.prompt_numbers(pairs_M), self.pairs.prompt_lengths[pairs_M].astype(np.int64))

    def name(self, sequence: int) -> str:
        pair, side = self.where(sequence)
        return f"the {side} response of row {self.pairs.rows[pair]}"


def find_missing(cache: LogprobCache, sequences: DistinctSequences, group: Group) -> npt.NDArray[np.int64]:
    """Return the sequences to score, the same on every rank. Only rank 0 reads the shards and sets corrupt ones aside."""
    known_S = torch.zeros(len(sequences), dtype=torch.uint8)
    if group.is_main:
        known_S = torch.from_numpy(cache.lookup(sequences.keys_SK).found_Q.astype(np.uint8))
    return np.flatnonzero(group.broadcast_(known_S.to(group.device)).cpu().numpy() == 0)


@dataclass
class _Shards:
    """Collects scores and commits them to the cache as a shard, after many tokens or `COMMIT_SECONDS`.

    A shard is permanent, so each commit first checks that the input files are unchanged.
    """

    cache: LogprobCache
    _keys: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    _scores: list[LogProbs] = field(default_factory=list)
    _tokens: int = 0
    _committed: float = field(default_factory=time.monotonic)

    def add(self, keys: npt.NDArray[np.uint8], scores: LogProbs) -> None:
        self._keys.append(keys)
        self._scores.append(scores)
        self._tokens += len(scores.tokens_N)
        if self._tokens >= _COMMIT_TOKENS or time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        if self._keys:
            check_inputs_unchanged()
            counts_S = torch.cat([scores.counts_S for scores in self._scores]).numpy().astype(np.int32)
            tokens_N = torch.cat([scores.tokens_N for scores in self._scores]).numpy()
            self.cache.add(np.concatenate(self._keys), counts_S, tokens_N)
        self._keys, self._scores, self._tokens, self._committed = [], [], 0, time.monotonic()


def score_missing(
    model: PreTrainedModel,
    sequences: DistinctSequences,
    missing_M: npt.NDArray[np.int64],
    cache: LogprobCache,
    group: Group,
    events: EventWriter,
) -> None:
    """Score this rank's part of `missing_M` into the cache, and wait for the other ranks.

    Raises TrainingError for a non-finite log-prob.
    """
    batches_of_M = shared_batches(sequences.lengths_S[missing_M], sequences.prompts(missing_M))
    batches = [Batch(missing_M[batch.positions], batch.sizes) for batch in batches_of_M]
    progress = Progress(events, int(sequences.lengths_S[missing_M].sum()), "tokens")
    shards = _Shards(cache)
    for scored in score_in_rounds(model, batches, sequences.read, group):
        if scored.own is not None:
            batch, scores = scored.own
            _check_finite_scores(scores, batch.positions, sequences)
            shards.add(sequences.keys_SK[batch.positions], scores)
        progress.advance(int(sequences.lengths_S[scored.all_positions].sum()))
    shards.commit()
    group.barrier()


def _check_finite_scores(scores: LogProbs, batch: npt.NDArray[np.int64], sequences: DistinctSequences) -> None:
    bad_N = ~np.isfinite(scores.tokens_N.numpy())
    if bad_N.any():
        sequence = int(np.repeat(batch, scores.counts_S.numpy())[bad_N][0])
        raise TrainingError(
            f"the reference model gives non-finite log-probs to {int(bad_N.sum())} of {len(bad_N)} tokens, first in "
            f"{sequences.name(sequence)}; check its weights, or set `reference.dtype: float32`",
            "non-finite-logprob",
        )
