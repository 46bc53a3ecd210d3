"""Scoring many sequences with a model that does not learn: what `reference` and `evaluation` have in common.

Legend: S sequences, N response tokens of all of them.

All responses to a prompt are scored together, so that the prompt is read once. Batches are made of such groups of similar size,
largest first: a batch that does not fit in memory fails at once, and an estimate of the time left errs on the safe side.
How many groups a batch has depends on its first one alone, and how many responses a group keeps together on its
longest. So when whole batches are taken off the list, because a pass that was killed had already committed them, the
rest is cut into the same batches as before, and a pass taken up again gives the bits of one that was never interrupted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.distributed import Group
from training.model.logprobs import response_logprobs, runs_in_lockstep
from training.model.prefix import TokenSequence

Positions = npt.NDArray[np.int64]

# Tokens of one batch, a shared prompt counted once. A constant, since it decides in which order a device adds numbers
# up: it is part of the way of scoring, not of the machine.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Prompts:
    """Which prompt each of S sequences answers, by any number that tells prompts apart, and how long that prompt is."""

    numbers_S: Positions
    lengths_S: Positions

    def take(self, positions: Positions) -> "Prompts":
        return Prompts(self.numbers_S[positions], self.lengths_S[positions])


@dataclass(frozen=True)
class Batch:
    """The positions of some sequences; `sizes` says how many consecutive ones each answer the same prompt."""

    positions: Positions
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Scores:
    """`counts_S`: response tokens of each sequence; `tokens_N`: their log-probs in nats, sequence after sequence."""

    counts_S: npt.NDArray[np.int32]
    tokens_N: npt.NDArray[np.float32]

    @property
    def sums_S(self) -> npt.NDArray[np.float64]:
        """Summed log-probs, added up in float64."""
        return self.tails_S(np.zeros(len(self.counts_S), np.int64))

    def tails_S(self, starts_S: Positions) -> npt.NDArray[np.float64]:
        """The part of each sum that belongs to the response's tokens number `starts_S[s]`, counted from 0, and after."""
        owners_N = np.repeat(np.arange(len(self.counts_S)), self.counts_S)
        begins_S = np.cumsum(self.counts_S, dtype=np.int64) - self.counts_S
        late_N = np.arange(len(owners_N)) - begins_S[owners_N] >= starts_S[owners_N]
        weights_N = self.tokens_N * late_N
        return np.bincount(owners_N, weights=weights_N, minlength=len(self.counts_S)).astype(np.float64)


def shared_batches(lengths_S: Positions, prompts: Prompts, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """The positions 0..S-1 in batches of at most `tokens` tokens, a prompt counted once; what is longer goes alone."""
    groups = [part for group in _by_prompt(lengths_S, prompts) for part in _cut(group, lengths_S, prompts, tokens)]
    costs = np.array([_tokens(group, lengths_S, prompts) for group in groups], dtype=np.int64)
    order = np.argsort(-costs, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, tokens // max(1, int(costs[order[start]])))
        chosen = [groups[at] for at in order[start : start + size]]
        batches.append(Batch(np.concatenate(chosen), tuple(map(len, chosen))))
        start += size
    return batches


def _by_prompt(lengths_S: Positions, prompts: Prompts) -> list[Positions]:
    """The sequences of each prompt, longest first, in the order of the prompts' first sequences."""
    _, first, which_S = np.unique(prompts.numbers_S, return_index=True, return_inverse=True)
    order_S = np.lexsort((-lengths_S, first[which_S]))
    return np.split(order_S, np.flatnonzero(np.diff(which_S[order_S])) + 1) if len(order_S) else []


def _cut(group: Positions, lengths_S: Positions, prompts: Prompts, tokens: int) -> list[Positions]:
    """Parts of a group that fit, if each response were as long as the part's first, which is its longest."""
    prompt = int(prompts.lengths_S[group[0]])
    parts, start = [], 0
    while start < len(group):
        longest = max(1, int(lengths_S[group[start]]) - prompt)
        size = max(1, (tokens - prompt) // longest)
        parts.append(group[start : start + size])
        start += size
    return parts


def _tokens(group: Positions, lengths_S: Positions, prompts: Prompts) -> int:
    return int(lengths_S[group].sum() - (len(group) - 1) * prompts.lengths_S[group[0]])


@dataclass(frozen=True)
class Scored:
    """Scores of this rank's batch of a round, if there was one left for it; `everyones`: positions of all of the round."""

    own: tuple[Batch, Scores] | None
    everyones: Positions


def score_in_turns(
    model: PreTrainedModel, batches: Sequence[Batch], read: Callable[[int], TokenSequence], group: Group
) -> Iterator[Scored]:
    """Score `batches` in rounds in which every rank gets one; `read` gives the sequence at a position.

    Where the ranks hold parts of the weights, one for which no batch is left runs that of another rank, since every
    pass is an exchange among all of them; and the scores of that it throws away.
    """
    for first in range(0, len(batches), group.world):
        dealt = batches[first : first + group.world]
        everyones = np.concatenate([batch.positions for batch in dealt])
        has_own = group.rank < len(dealt)
        if has_own or runs_in_lockstep(model):
            batch = dealt[group.rank if has_own else 0]
            scores = score(model, [read(int(at)) for at in batch.positions], batch.sizes)
        yield Scored((batch, scores) if has_own else None, everyones)


def score(model: PreTrainedModel, sequences: Sequence[TokenSequence], sizes: Sequence[int] | None = None) -> Scores:
    """The log-probs of the response tokens of one batch, on the host; `sizes` as in `Batch`, by default each alone."""
    with torch.no_grad():  # not inference_mode: what a sharded model gathers in that could not be trained with later
        logprobs = response_logprobs(model, sequences, sizes)
    return Scores(logprobs.counts_S.cpu().numpy().astype(np.int32), logprobs.tokens_N.cpu().numpy().astype(np.float32))
