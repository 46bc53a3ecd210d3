"""Floating-point operations of one epoch of training, compared with the least that any trainer needs.

Legend: T tokens with each prompt once, N response tokens, L layers, D width of all query heads, H hidden size, V vocabulary.

The least, with the reference cached: six operations a weight and token for the layers (two forward, four backward), and six a
weight and response token for the head. For attention, four operations for each token, each token that it may see (itself
included), layer and unit of D, three times: once forward, twice backward.

Counted: every matrix product of forward and backward, by torch's FlopCounterMode. Attention is counted by hand from the plan
of each row, because the mode does not see into its kernels: whole rectangles of queries and keys, with five products backward
for two forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from benchmarks.workload import batches, training_settings
from training.data.tokenization.pair_dataset import SIDES, Pairs
from training.model.attention.shared_prefix import PackedRow, TokenSequence, build_row
from training.model.logprobs.head import head_of
from training.model.logprobs.logprob_tiles import Budget, token_logprobs
from training.model.logprobs.response_logprobs import response_logprobs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Operations:
    """`kept`: the budget's worth of logits is kept from forward to backward; `recomputed`: none is kept."""

    least: float
    kept: float
    recomputed: float


def _addmm_in_place(total: list[int], left: list[int], right: list[int], **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


UNCOUNTED = {torch.ops.aten.addmm_: _addmm_in_place}  # torch counts it only when it writes into a new tensor


def count(model: PreTrainedModel, pairs: Pairs, micro_tokens: int) -> Operations:
    """Count the operations of every micro-batch of one epoch."""
    kept = recomputed = 0.0
    for groups in _micro_batches(pairs, micro_tokens):
        row = build_row(groups, CPU)
        both = _attention(model, row)
        kept += both + _products(model, groups)
        recomputed += both + _products(model, groups) + _again(model, row)
    return Operations(least(model, pairs), kept, recomputed)


def _micro_batches(pairs: Pairs, micro_tokens: int) -> Iterator[list[list[TokenSequence]]]:
    found = batches(pairs, training_settings(micro_tokens))
    for step in range(1, found.steps_per_epoch + 1):
        for part in found.micro_batches(step, 0, 1):
            yield [[pairs.sequence(int(item), side) for side in SIDES] for item in part.items]


def _products(model: PreTrainedModel, groups: list[list[TokenSequence]]) -> float:
    """Return the matrix products of the real forward and backward."""
    sequences = [sequence for group in groups for sequence in group]
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        response_logprobs(model, sequences, [len(group) for group in groups]).tokens_N.sum().backward()
    model.zero_grad()
    by_kernel = counter.get_flop_counts()["Global"]
    return float(sum(flops for kernel, flops in by_kernel.items() if "attention" not in str(kernel)))


def _again(model: PreTrainedModel, row: PackedRow) -> float:
    """Return the head's additional backward operations if no tile is kept, as counted on hidden states of zero."""
    head, hidden_NH = head_of(model), torch.zeros(len(row.predictors_N), model.config.hidden_size)
    totals = []
    budget = Budget.of(CPU)
    for kept in (0, budget.kept):
        with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
            inputs = hidden_NH.clone().requires_grad_()
            token_logprobs(inputs, row.targets_N, head, budget=Budget(budget.tile, kept))[0].sum().backward()
        totals.append(counter.get_total_flops())
    model.zero_grad()
    return float(totals[0] - totals[1])


def _attention(model: PreTrainedModel, row: PackedRow) -> float:
    pairs = sum(part.length * (row.plan.before(n) + part.length) for n, part in enumerate(row.plan.segments))
    return (1 + 2.5) * 4 * _width(model) * model.config.num_hidden_layers * pairs


def least(model: PreTrainedModel, pairs: Pairs, prompts: int = 1) -> float:
    """Return the least operations of one epoch, with each prompt run `prompts` times."""
    head, embeddings = head_of(model).weight_VH.numel(), model.get_input_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters() if p.ndim > 1) - head - embeddings
    starts = pairs.prompt_lengths.astype(int)
    tokens, seen = prompts * int(starts.sum()), prompts * int((starts * (starts + 1) // 2).sum())
    responses = 0
    for side in SIDES:
        lengths = pairs.lengths(side)
        tokens += int((lengths - starts).sum())
        seen += int((lengths * (lengths + 1) // 2 - starts * (starts + 1) // 2).sum())
        responses += sum(int(pairs.sequence(i, side).mask_T[1:].sum()) for i in range(len(pairs)))
    return 6.0 * (body * tokens + head * responses) + 3 * 4 * _width(model) * model.config.num_hidden_layers * seen


def _width(model: PreTrainedModel) -> int:
    return int(model.config.num_attention_heads * model.config.head_dim)
