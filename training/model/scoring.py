"""Scoring many sequences with a model that does not learn: what `reference` and `evaluation` have in common.

Legend: S sequences, N response tokens of all of them.

Batches are made of sequences of similar length, longest first: a batch that does not fit in memory fails at once, and
an estimate of the time left errs on the safe side. How many sequences a batch has depends on its first one alone. So
when whole batches are taken off the list, because a pass that was killed had already committed them, the rest is cut
into the same batches as before, and a pass taken up again gives the bits of one that was never interrupted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.distributed import Group
from training.model.logprobs import TokenSequence, response_logprobs

Positions = npt.NDArray[np.int64]

# Padded tokens of one batch. A constant, since it decides in which order a device adds numbers up: it is part of the
# way of scoring, not of the machine.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Scores:
    """`counts_S`: response tokens of each sequence; `tokens_N`: their log-probs in nats, sequence after sequence."""

    counts_S: npt.NDArray[np.int32]
    tokens_N: npt.NDArray[np.float32]

    @property
    def sums_S(self) -> npt.NDArray[np.float64]:
        """Summed log-probs, added up in float64."""
        owners_N = np.repeat(np.arange(len(self.counts_S)), self.counts_S)
        return np.bincount(owners_N, weights=self.tokens_N, minlength=len(self.counts_S)).astype(np.float64)


def padded_batches(lengths_S: Positions, tokens: int = BATCH_TOKENS) -> list[Positions]:
    """The positions 0..S-1 in batches of at most `tokens` tokens with padding; one longer than that goes alone."""
    order_S = np.argsort(-lengths_S, kind="stable")
    batches, start = [], 0
    while start < len(order_S):
        size = max(1, tokens // max(1, int(lengths_S[order_S[start]])))
        batches.append(order_S[start : start + size])
        start += size
    return batches


def deal(batches: Sequence[Positions], group: Group) -> Iterator[tuple[Positions, Positions]]:
    """Rounds in which every rank gets one batch: this rank's own (empty if none is left), and all of the round."""
    for first in range(0, len(batches), group.world):
        dealt = batches[first : first + group.world]
        yield (dealt[group.rank] if group.rank < len(dealt) else dealt[0][:0]), np.concatenate(dealt)


def score(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> Scores:
    """The log-probs of the response tokens of one batch, on the host."""
    with torch.inference_mode():
        logprobs = response_logprobs(model, sequences)
    return Scores(logprobs.counts_S.cpu().numpy().astype(np.int32), logprobs.tokens_N.cpu().numpy().astype(np.float32))
