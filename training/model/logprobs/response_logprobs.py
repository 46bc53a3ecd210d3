"""Log-probabilities of responses under a model: the one place where a model's forward pass is called.

Legend: S sequences, N response tokens of all sequences together, T tokens of a row, H hidden size.

    collate     sequences become one row without padding, in which a shared prompt appears once         (shared_prefix.py)
    run         the model's body over the row, each response attending to its prompt and itself         (packed_attention.py)
    select      the hidden states that predict a response token: only these go through the head
    score       head and log-softmax, the vocabulary in tiles                                           (logprob_tiles.py)

A mixture of experts also reports how it routed the row's tokens, if it is asked to (expert_routing.py).

Policy and reference, training and evaluation all come through here, so that in a reward, a difference of two log-probs,
systematic errors cancel. A model that cannot share prefixes runs each sequence in a row of its own, with its usual
attention: slower, with the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.distributed import Group
from training.model.attention.packed_attention import SHARED_PREFIX, use_attention
from training.model.attention.prefix_support import rope_by_length, why_not_shared
from training.model.attention.shared_prefix import PackedRow, TokenSequence, build_row
from training.model.backbone import body_of
from training.model.expert_routing import Routing, routing_of, total
from training.model.logprobs.head import head_of
from training.model.logprobs.logprob_tiles import token_logprobs

_HOOKED = "_pedigree_tokens"


@dataclass(frozen=True)
class LogProbs:
    """`tokens_N`: the log-prob in nats of every response token, sequence after sequence; `counts_S`: how many each has.

    `collisions_N`, if asked for: the logarithm of the sum of squared probabilities of the vocabulary in the token's place.
    `routing`, if asked for: that of all tokens that were run.
    """

    tokens_N: Tensor
    counts_S: Tensor
    collisions_N: Tensor | None = None
    routing: Routing | None = None

    @property
    def sums_S(self) -> Tensor:
        """Summed log-probs, a sequence each, differentiable, in float64: the sum of 100 tokens in float32 is 1e-4 off."""
        return self._summed(self.tokens_N.double())

    def tails_S(self, starts_S: Tensor) -> Tensor:
        """The part of each sum that belongs to the response's tokens number `starts_S[s]`, counted from 0, and after."""
        begins_S = self.counts_S.cumsum(0) - self.counts_S
        numbers_N = torch.arange(len(self.tokens_N), device=self.tokens_N.device) - begins_S[self._owners_N]
        return self._summed(self.tokens_N.double() * (numbers_N >= starts_S[self._owners_N]))

    @property
    def typicality_S(self) -> Tensor:
        """exp of the mean of log-prob minus collision: 1 where the model's own samples are as probable; no gradient."""
        assert self.collisions_N is not None, "collisions were not asked for"
        excess_N = (self.tokens_N.detach() - self.collisions_N).double()
        return (self._summed(excess_N) / self.counts_S.clamp(min=1)).exp()

    @cached_property
    def _owners_N(self) -> Tensor:
        owners_S = torch.arange(len(self.counts_S), device=self.tokens_N.device)
        return torch.repeat_interleave(owners_S, self.counts_S, output_size=len(self.tokens_N))

    def _summed(self, values_N: Tensor) -> Tensor:
        zeros_S = torch.zeros(len(self.counts_S), dtype=torch.float64, device=values_N.device)
        return zeros_S.index_add(0, self._owners_N, values_N)


@dataclass(frozen=True)
class CollatedRows:
    """Sequences on the device of their model: all in one row, `sharing` their prefixes, or each in a row of its own."""

    rows: list[PackedRow]
    sharing: bool


def response_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    sizes: Sequence[int] | None = None,
    routing: bool = False,
) -> LogProbs:
    """Log-probs of the response tokens of `sequences`, in their order; gradients flow unless they are switched off."""
    return logprobs_of(model, collate(model, sequences, sizes), routing=routing)


def collate(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], sizes: Sequence[int] | None = None
) -> CollatedRows:
    """Lay `sequences` out for a pass of `model` in its present mode, on its device.

    `sizes` are those of the groups of consecutive sequences that share a prompt; by default each is alone. What a group really
    has in common is found by comparing tokens, so a wrong group costs time and is not an error.

    Raises ModelError for a sequence that is too long for `dynamic` rotary positions: beyond those of training, transformers
    lets them depend on the rows that were run before.
    """
    device = next(model.parameters()).device
    sharing = why_not_shared(model, model.training) is None
    remaining = iter(sequences)
    groups = [list(islice(remaining, size)) for size in (sizes or [1] * len(sequences))]
    rows = [groups] if sharing else [[[sequence]] for sequence in sequences]
    by_length = rope_by_length(model)
    if "dynamic" in by_length:
        _check_length(body_of(model).config.max_position_embeddings, sequences)
    return CollatedRows([build_row(row, device, whole=bool(by_length)) for row in rows], sharing)


def _check_length(limit: int, sequences: Sequence[TokenSequence]) -> None:
    if (longest := max((len(sequence.ids_T) for sequence in sequences), default=0)) > limit:
        raise ModelError(
            f"a sequence has {longest:,} tokens, and the model's dynamic rotary positions were trained for {limit:,}: "
            f"what transformers computes of longer ones depends on those before; set `tokenization.max_length: {limit}`"
        )


def logprobs_of(
    model: PreTrainedModel, collated: CollatedRows, collisions: bool = False, routing: bool = False
) -> LogProbs:
    """The log-probs of sequences that were collated for `model`."""
    run = getattr(model, _HOOKED, partial(_tokens, model))
    tokens_N, collisions_N, routed = run(collated.rows, collated.sharing, collisions, routing)
    return LogProbs(tokens_N, torch.cat([row.counts_S for row in collated.rows]), collisions_N, routed)


def register_fsdp_forward(model: PreTrainedModel, group: Group) -> None:
    """Register the pass with FSDP, which wraps `model`, as one of its forward passes: FSDP gathers weights for those alone."""
    setattr(model, _HOOKED, partial(_tokens, model, lockstep=group))
    register_fsdp_forward_method(model, _HOOKED)


def is_collective(model: PreTrainedModel) -> bool:
    """Whether the weights of `model` are sharded: then every pass is collective, and all ranks must run the same number."""
    return hasattr(model, _HOOKED)


def _tokens(
    model: PreTrainedModel,
    rows: Sequence[PackedRow],
    sharing: bool,
    collisions: bool,
    routing: bool,
    lockstep: Group | None = None,
) -> tuple[Tensor, Tensor | None, Routing | None]:
    """The log-prob of each response token; its collision and the routing if asked for: all of the pass that reads weights.

    In `lockstep` all ranks run the same number of rows: one with fewer runs its first again, and discards the result.
    """
    missing = 0 if sharing or lockstep is None else _most(len(rows), lockstep) - len(rows)
    parts = [_body(model, row, sharing, routing) for row in rows]
    discarded = [_body(model, rows[0], sharing, routing)[0][:0] for _ in range(missing)]
    targets_N, head = torch.cat([row.targets_N for row in rows]), head_of(model)
    hidden_NH = torch.cat([hidden_NH for hidden_NH, _ in parts] + discarded)
    hidden_NH = hidden_NH.to(head.weight_VH.dtype)  # mamba's are float32; its own head rounds them too
    routed = total([of_row for _, of_row in parts if of_row is not None]) if routing else None
    return *token_logprobs(hidden_NH, targets_N, head, collisions), routed


def _most(count: int, group: Group) -> int:
    return int(group.gather_rows(torch.tensor([count], device=group.device)).max())


def _body(model: PreTrainedModel, row: PackedRow, sharing: bool, routing: bool) -> tuple[Tensor, Routing | None]:
    """The hidden states that predict response tokens, N x H, of the model without its head; the row's routing if asked for."""
    inputs: dict[str, Any] = {"input_ids": row.ids_T[None], "position_ids": row.positions_T[None], "use_cache": False}
    if routing:
        inputs["output_router_logits"] = True
    body = body_of(model)
    if sharing:
        with use_attention(model, SHARED_PREFIX):
            output = body(**inputs, plan=row.plan)
    else:
        output = body(**inputs)
    hidden_NH: Tensor = output.last_hidden_state[0].index_select(0, row.predictors_N)
    return hidden_NH, routing_of(model, output.get("router_logits", ()), row.sequences_T) if routing else None
