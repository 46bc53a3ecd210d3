"""Log-probs of responses under a model. Only this module calls a model's forward pass.

Legend: S sequences, N response tokens of all sequences together, T tokens of a row, H hidden size.

    collate     sequences become one row without padding; a shared prompt appears once                  (shared_prefix.py)
    run         the model's body over the row; each response attends to its prompt and itself           (packed_attention.py)
    select      the hidden states that predict a response token; only these go through the head
    score       head and log-softmax, the vocabulary in tiles                                           (logprob_tiles.py)

On request a mixture of experts also returns its routing of the row's tokens (expert_routing.py).

Policy and reference, training and evaluation all use this code. So systematic errors cancel in a reward, the difference of
two log-probs. A model that cannot share prefixes runs each sequence in a row of its own, with its usual attention. This is
slower and gives the same result.
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
    """`tokens_N`: the log-prob in nats of each response token, sequence after sequence; `counts_S`: tokens per sequence.

    On request, `collisions_N`: the logarithm of the sum of squared probabilities over the vocabulary, for each token; and
    `routing`: the routing of all tokens that ran.
    """

    tokens_N: Tensor
    counts_S: Tensor
    collisions_N: Tensor | None = None
    routing: Routing | None = None

    @property
    def sums_S(self) -> Tensor:
        """Return the sum of each sequence, differentiable, in float64: a float32 sum of 100 tokens is off by 1e-4."""
        return self._sum_by_sequence(self.tokens_N.double())

    def tails_S(self, starts_S: Tensor) -> Tensor:
        """Return the sum of each response's tokens from number `starts_S[s]` on, counted from 0."""
        begins_S = self.counts_S.cumsum(0) - self.counts_S
        numbers_N = torch.arange(len(self.tokens_N), device=self.tokens_N.device) - begins_S[self._owners_N]
        return self._sum_by_sequence(self.tokens_N.double() * (numbers_N >= starts_S[self._owners_N]))

    @property
    def typicality_S(self) -> Tensor:
        """Return exp of the mean of log-prob minus collision, without gradient: 1 for a response as typical as samples."""
        assert self.collisions_N is not None, "requires collisions"
        excess_N = (self.tokens_N.detach() - self.collisions_N).double()
        return (self._sum_by_sequence(excess_N) / self.counts_S.clamp(min=1)).exp()

    @cached_property
    def _owners_N(self) -> Tensor:
        owners_S = torch.arange(len(self.counts_S), device=self.tokens_N.device)
        return torch.repeat_interleave(owners_S, self.counts_S, output_size=len(self.tokens_N))

    def _sum_by_sequence(self, values_N: Tensor) -> Tensor:
        zeros_S = torch.zeros(len(self.counts_S), dtype=torch.float64, device=values_N.device)
        return zeros_S.index_add(0, self._owners_N, values_N)


@dataclass(frozen=True)
class CollatedRows:
    """Sequences on their model's device: all in one row if `sharing` prefixes, else one row each."""

    rows: list[PackedRow]
    sharing: bool


def response_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    sizes: Sequence[int] | None = None,
    routing: bool = False,
) -> LogProbs:
    """Return the log-probs of the response tokens of `sequences`, in their order, differentiable."""
    return logprobs_of(model, collate(model, sequences, sizes), routing=routing)


def collate(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], sizes: Sequence[int] | None = None
) -> CollatedRows:
    """Lay out `sequences` for a pass of `model` in its current mode, on its device.

    `sizes`: sizes of the groups of consecutive sequences with the same prompt; by default 1 each. The shared prefix is found
    by comparing tokens, so a wrong group costs only time.

    Raise ModelError for a sequence too long for `dynamic` rotary positions: beyond the trained length, transformers makes
    them depend on earlier rows.
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
            f"a sequence has {longest:,} tokens, but the model's dynamic rotary positions are exact only up to {limit:,}: "
            f"set `tokenization.max_length: {limit}`",
            "sequence-too-long",
        )


def logprobs_of(
    model: PreTrainedModel, collated: CollatedRows, collisions: bool = False, routing: bool = False
) -> LogProbs:
    """Return the log-probs of sequences collated for `model`."""
    run = getattr(model, _HOOKED, partial(_score_tokens, model))
    tokens_N, collisions_N, routed = run(collated.rows, collated.sharing, collisions, routing)
    return LogProbs(tokens_N, torch.cat([row.counts_S for row in collated.rows]), collisions_N, routed)


def register_fsdp_forward(model: PreTrainedModel, group: Group) -> None:
    """Register the pass of a sharded `model` as a forward method: FSDP gathers weights only for these."""
    setattr(model, _HOOKED, partial(_score_tokens, model, lockstep=group))
    register_fsdp_forward_method(model, _HOOKED)


def is_collective(model: PreTrainedModel) -> bool:
    """Return whether the weights of `model` are sharded. Then all ranks must run the same number of passes."""
    return hasattr(model, _HOOKED)


def _score_tokens(
    model: PreTrainedModel,
    rows: Sequence[PackedRow],
    sharing: bool,
    collisions: bool,
    routing: bool,
    lockstep: Group | None = None,
) -> tuple[Tensor, Tensor | None, Routing | None]:
    """Return each response token's log-prob, its collision and the routing on request. All reads of weights are in here.

    With `lockstep` all ranks run the same number of rows. A rank with fewer repeats its first row and discards the result.
    """
    missing = 0 if sharing or lockstep is None else _max_over_ranks(len(rows), lockstep) - len(rows)
    parts = [_run_body(model, row, sharing, routing) for row in rows]
    discarded = [_run_body(model, rows[0], sharing, routing)[0][:0] for _ in range(missing)]
    targets_N, head = torch.cat([row.targets_N for row in rows]), head_of(model)
    hidden_NH = torch.cat([hidden_NH for hidden_NH, _ in parts] + discarded)
    hidden_NH = hidden_NH.to(head.weight_VH.dtype)  # mamba's hidden states are float32; its own head rounds them too
    routed = total([row_routing for _, row_routing in parts if row_routing is not None]) if routing else None
    return *token_logprobs(hidden_NH, targets_N, head, collisions), routed


def _max_over_ranks(count: int, group: Group) -> int:
    return int(group.gather_rows(torch.tensor([count], device=group.device)).max())


def _run_body(model: PreTrainedModel, row: PackedRow, sharing: bool, routing: bool) -> tuple[Tensor, Routing | None]:
    """Return the body's hidden states that predict response tokens, N x H, and the row's routing on request."""
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
