"""Scoring the sequences that the memo lacks, each distinct one once, divided among the ranks.

Pairs share responses and data sets share pairs, so the work is over distinct sequences, by their keys. The missing ones are
cut into batches, all responses to a prompt together, and the ranks take turns at the batches: disjoint parts of nearly
equal cost. Each rank commits shards of its own every half minute, so a killed pass loses no more than that.

Legend: P pairs, S distinct sequences, M missing ones.
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

    The 2P responses have places: the chosen ones of all pairs, then the rejected ones. `first_S` is the first place of each
    sequence, `sequence_2P` the sequence at each place.
    """

    pairs: Pairs
    keys_SK: npt.NDArray[np.uint8]
    lengths_S: npt.NDArray[np.int64]
    first_S: npt.NDArray[np.int64]
    sequence_2P: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Pairs) -> "DistinctSequences":
        keys_2PK = np.concatenate([pairs.keys(side) for side in SIDES])
        whole_2P = keys_2PK.view(np.dtype((np.void, KEY_BYTES)))[:, 0]  # one comparison a key, not one a byte
        _, first_S, sequence_2P = np.unique(whole_2P, return_index=True, return_inverse=True)
        lengths_2P = np.concatenate([pairs.lengths(side) for side in SIDES])
        return cls(pairs, keys_2PK[first_S], lengths_2P[first_S], first_S, sequence_2P)

    def __len__(self) -> int:
        return len(self.keys_SK)

    def where(self, sequence: int) -> tuple[int, Side]:
        """The first pair that has this sequence, and on which side."""
        side, pair = divmod(int(self.first_S[sequence]), len(self.pairs))
        return pair, SIDES[side]

    def read(self, sequence: int) -> TokenSequence:
        return self.pairs.sequence(*self.where(sequence))

    def prompts(self, some_M: npt.NDArray[np.int64]) -> Prompts:
        """The prompt of each of these sequences, from the first pair that has it."""
        pairs_M = self.first_S[some_M] % len(self.pairs)
        return Prompts(self.pairs.prompt_numbers(pairs_M), self.pairs.prompt_lengths[pairs_M].astype(np.int64))

    def name(self, sequence: int) -> str:
        pair, side = self.where(sequence)
        return f"the {side} response of row {self.pairs.rows[pair]}"


@dataclass
class _Shards:
    """Collects scores, and adds them to the memo as a shard once there are many, or some time has passed.

    A shard stays for good, so what was scored is first compared with what was hashed.
    """

    memo: LogprobCache
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
            self.memo.add(np.concatenate(self._keys), counts_S, tokens_N)
        self._keys, self._scores, self._tokens, self._committed = [], [], 0, time.monotonic()


def score_missing(
    model: PreTrainedModel,
    sequences: DistinctSequences,
    missing_M: npt.NDArray[np.int64],
    memo: LogprobCache,
    group: Group,
    events: EventWriter,
) -> None:
    """Score this rank's part of `missing_M` into the memo, and wait for the others. Raises TrainingError."""
    found = shared_batches(sequences.lengths_S[missing_M], sequences.prompts(missing_M))
    batches = [Batch(missing_M[batch.positions], batch.sizes) for batch in found]
    progress = Progress(events, int(sequences.lengths_S[missing_M].sum()), "tokens")
    shards = _Shards(memo)
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
            f"the reference model gives {int(bad_N.sum())} tokens of {len(bad_N)} a log-prob that is not finite, first "
            f"in {sequences.name(sequence)}; its weights are broken or `reference.dtype` is too narrow: try float32"
        )
