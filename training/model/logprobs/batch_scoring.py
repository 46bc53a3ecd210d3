"""Scoring of many sequences without gradients, for the reference log-probs and the evaluation.

Legend: S sequences, N response tokens of all of them.

All responses to a prompt are scored together, so that the prompt runs once. A batch consists of such groups of similar size.
The largest come first: a lack of memory shows at once, and the estimate of the time left errs on the long side. The number of
groups in a batch depends only on its first group, and the number of responses in a group only on its longest one. So if a
pass is killed after some batches are in the log-prob cache, the rest is cut into the same batches as before, and the resumed
pass gives the same bits as an uninterrupted one.
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

# Tokens of one batch, a shared prompt counted once. It must not depend on the machine: it decides the order of sums, and thus
# the last bits of a log-prob.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Prompts:
    """The prompt of each of S sequences: an identifying number and a length."""

    numbers_S: Positions
    lengths_S: Positions


@dataclass(frozen=True)
class Batch:
    """The positions of some sequences; `sizes`: the numbers of consecutive ones with the same prompt."""

    positions: Positions
    sizes: tuple[int, ...]


def shared_batches(lengths_S: Positions, prompts: Prompts, tokens: int = BATCH_TOKENS) -> list[Batch]:
    """Return positions 0..S-1 in batches of at most `tokens` tokens, a prompt counted once. Longer sequences go alone."""
    groups = [part for group in _by_prompt(lengths_S, prompts) for part in _cut(group, lengths_S, prompts, tokens)]
    costs = np.array([_tokens(group, lengths_S, prompts) for group in groups], dtype=np.int64)
    order = np.argsort(-costs, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, tokens // max(1, int(costs[order[start]])))
        chosen = [groups[index] for index in order[start : start + size]]
        batches.append(Batch(np.concatenate(chosen), tuple(map(len, chosen))))
        start += size
    return batches


def _by_prompt(lengths_S: Positions, prompts: Prompts) -> list[Positions]:
    """Return the sequences of each prompt, longest first, in the order of the prompts' first sequences."""
    _, first, prompts_S = np.unique(prompts.numbers_S, return_index=True, return_inverse=True)
    order_S = np.lexsort((-lengths_S, first[prompts_S]))
    return np.split(order_S, np.flatnonzero(np.diff(prompts_S[order_S])) + 1) if len(order_S) else []


def _cut(group: Positions, lengths_S: Positions, prompts: Prompts, tokens: int) -> list[Positions]:
    """Return parts of a group that fit into `tokens`. Each response counts as long as the part's first, the longest."""
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
    """One round: this rank's batch with its scores, if any, and the positions that all ranks scored."""

    own: tuple[Batch, LogProbs] | None
    all_positions: Positions


def score_in_rounds(
    model: PreTrainedModel, batches: Sequence[Batch], read: Callable[[int], TokenSequence], group: Group
) -> Iterator[ScoredRound]:
    """Score `batches` in rounds of one batch per rank. `read` returns a sequence by position, in a thread, a batch ahead.

    The last round may be incomplete. With a sharded model every pass is collective: a rank without a batch runs the batch of
    rank 0 and drops the scores.
    """
    rounds = [batches[first : first + group.world] for first in range(0, len(batches), group.world)]
    rank_batches = [round_[group.rank] for round_ in rounds if group.rank < len(round_)]
    padding = rounds[-1][:1] if len(rank_batches) < len(rounds) and is_collective(model) else []

    def collate_batch(batch: Batch) -> CollatedRows:
        return collate(model, [read(int(position)) for position in batch.positions], batch.sizes)

    scored = ((batch, score(model, rows)) for batch, rows in prefetch(collate_batch, [*rank_batches, *padding]))
    for number, round_ in enumerate(rounds):
        own = next(scored, None)
        all_positions = np.concatenate([batch.positions for batch in round_])
        yield ScoredRound(own if number < len(rank_batches) else None, all_positions)


def score(model: PreTrainedModel, collated: CollatedRows) -> LogProbs:
    """Return the log-probs of sequences collated for `model`, without gradients, on the CPU."""
    with torch.no_grad():  # not inference_mode: FSDP would gather tensors there that training cannot use later
        logprobs = logprobs_of(model, collated)
    return LogProbs(logprobs.tokens_N.float().cpu(), logprobs.counts_S.cpu())
