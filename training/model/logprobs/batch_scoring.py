"""Scoring many sequences without gradients, for the reference pass and the evaluation.

Legend: S sequences, N response tokens of all of them.

All responses to a prompt are scored together, so that the prompt runs once. Batches are made of such groups of similar size,
largest first: a batch that does not fit in memory fails at once, and the estimate of the time left errs on the long side.
How many groups a batch has depends on its first group alone, and how many responses a group has on its longest one. So
when a pass was killed and some of its batches are already in the memo, the rest is cut into the same batches as before,
and the resumed pass gives the bits of one that was never interrupted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from training.distributed import Group
from training.model.attention.shared_prefix import TokenSequence
from training.model.device_prefetch import prefetch
from training.model.logprobs.response_logprobs import CollatedRows, LogProbs, collate, is_collective, logprobs_of

Positions = npt.NDArray[np.int64]

# Tokens of one batch, a shared prompt counted once. Not a setting of the machine: it decides the order of sums, and with
# it the last bits of a log-prob.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Prompts:
    """For each of S sequences a number that identifies its prompt, and the length of that prompt."""

    numbers_S: Positions
    lengths_S: Positions


@dataclass(frozen=True)
class Batch:
    """The positions of some sequences; `sizes` says how many consecutive ones each answer the same prompt."""

    positions: Positions
    sizes: tuple[int, ...]


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
    """Parts of a group that fit into `tokens`, each response counted as long as the part's first, its longest."""
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
class ScoredRound:
    """One round: this rank's batch with its scores, if it had one, and the positions that all ranks scored."""

    own: tuple[Batch, LogProbs] | None
    all_positions: Positions


def score_in_rounds(
    model: PreTrainedModel, batches: Sequence[Batch], read: Callable[[int], TokenSequence], group: Group
) -> Iterator[ScoredRound]:
    """Score `batches` in rounds, one for each rank; `read` gives the sequence at a position, in a thread, a batch ahead.

    The last round may have too few. With a sharded model every pass is collective, so a rank without a batch runs that of rank
    0 and drops the scores.
    """
    rounds = [batches[first : first + group.world] for first in range(0, len(batches), group.world)]
    mine = [round_[group.rank] for round_ in rounds if group.rank < len(round_)]
    company = rounds[-1][:1] if len(mine) < len(rounds) and is_collective(model) else []

    def collated(batch: Batch) -> CollatedRows:
        return collate(model, [read(int(at)) for at in batch.positions], batch.sizes)

    scored = ((batch, score(model, rows)) for batch, rows in prefetch(collated, [*mine, *company]))
    for number, round_ in enumerate(rounds):
        own = next(scored, None)
        yield ScoredRound(own if number < len(mine) else None, np.concatenate([each.positions for each in round_]))


def score(model: PreTrainedModel, collated: CollatedRows) -> LogProbs:
    """The log-probs of sequences that were collated for `model`, without gradients and on the CPU."""
    with torch.no_grad():  # not inference_mode: tensors that FSDP gathers there cannot be used in training later
        logprobs = logprobs_of(model, collated)
    return LogProbs(logprobs.tokens_N.float().cpu(), logprobs.counts_S.cpu())
