"""Log-probabilities of responses under a model: the one place where a model's forward pass is called.

Legend: S sequences, N response tokens of all sequences together, T tokens of a row, H hidden size.

    lay out     sequences that share a prompt become one row without padding, the prompt in it once     (prefix.py)
    run         the model's body over the row, each response attending to its prompt and itself         (attention.py)
    pick        the hidden states that predict a response token: no other row goes through the head
    score       head and log-softmax, the vocabulary in tiles                                           (tiles.py)

Policy and reference, training and evaluation all come through here, so what cancels in a reward does cancel. A model that
cannot share prefixes runs each sequence in a row of its own, in the attention it came with: slower, and the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from training.distributed import Group
from training.model.attention import refusal, shared_prefixes
from training.model.head import head_of
from training.model.prefix import Row, TokenSequence, lay_out
from training.model.tiles import token_logprobs, token_logprobs_and_collisions

_HOOKED = "_pedigree_tokens"


@dataclass(frozen=True)
class LogProbs:
    """`tokens_N`: the log-prob in nats of every response token, sequence after sequence; `counts_S`: how many each has.

    `collisions_N`, if asked for: the logarithm of the sum of squared probabilities of the vocabulary in the token's place.
    """

    tokens_N: Tensor
    counts_S: Tensor
    collisions_N: Tensor | None = None

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
class LaidOut:
    """Sequences ready for a pass: all in one row, `sharing` what they have in common, or each in a row of its own."""

    rows: list[Row]
    sharing: bool


def response_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    sizes: Sequence[int] | None = None,
    collisions: bool = False,
) -> LogProbs:
    """Log-probs of the response tokens of `sequences`, in their order; gradients flow unless they are switched off."""
    return logprobs_of(model, lay_out_for(model, sequences, sizes), collisions)


def lay_out_for(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], sizes: Sequence[int] | None = None
) -> LaidOut:
    """Make `sequences` ready for a pass of `model` in its present mode, on its device.

    `sizes` says how many consecutive sequences each share a prompt; without it none do. What they really have in
    common is found by comparing tokens, so a wrong group costs time and is not an error.
    """
    device = next(model.parameters()).device
    sharing = refusal(model, model.training) is None
    remaining = iter(sequences)
    groups = [list(islice(remaining, size)) for size in (sizes or [1] * len(sequences))]
    batches = [groups] if sharing else [[[sequence]] for sequence in sequences]
    return LaidOut([lay_out(batch, device) for batch in batches], sharing)


def logprobs_of(model: PreTrainedModel, laid_out: LaidOut, collisions: bool = False) -> LogProbs:
    """The log-probs of sequences that were laid out for `model`."""
    run = getattr(model, _HOOKED, partial(_tokens, model))
    tokens_N, collisions_N = run(laid_out.rows, laid_out.sharing, collisions)
    return LogProbs(tokens_N, torch.cat([row.counts_S for row in laid_out.rows]), collisions_N)


def hook_passes(model: PreTrainedModel, group: Group) -> None:
    """Let FSDP, in which `model` was wrapped, know that what runs here is a forward pass of the model, head included."""
    setattr(model, _HOOKED, partial(_tokens, model, lockstep=group))
    register_fsdp_forward_method(model, _HOOKED)


def runs_in_lockstep(model: PreTrainedModel) -> bool:
    """Whether every pass of `model` is an exchange among the ranks, so that all of them must run equally many."""
    return hasattr(model, _HOOKED)


def _tokens(
    model: PreTrainedModel, rows: Sequence[Row], sharing: bool, collisions: bool, lockstep: Group | None = None
) -> tuple[Tensor, Tensor | None]:
    """The log-prob of each response token, and its collision if asked for: all of the pass that reads weights.

    In `lockstep` all ranks run equally many rows: one with fewer runs its first again, and of that takes no token.
    """
    missing = 0 if sharing or lockstep is None else _most(len(rows), lockstep) - len(rows)
    parts = [_hidden(model, row, sharing) for row in rows]
    parts += [_hidden(model, rows[0], sharing)[:0] for _ in range(missing)]
    hidden_NH = torch.cat(parts)
    targets_N, head = torch.cat([row.targets_N for row in rows]), head_of(model)
    if collisions:
        return token_logprobs_and_collisions(hidden_NH, targets_N, head)
    return token_logprobs(hidden_NH, targets_N, head), None


def _most(count: int, group: Group) -> int:
    return int(group.gather_rows(torch.tensor([count], device=group.device)).max())


def _hidden(model: PreTrainedModel, row: Row, sharing: bool) -> Tensor:
    """The hidden states that predict response tokens, N x H, from the model without its head."""
    inputs = {"input_ids": row.ids_T[None], "position_ids": row.positions_T[None], "use_cache": False}
    body = model.base_model if model.base_model is not model else model.get_submodule("model")  # llama4 names another
    if sharing:
        with shared_prefixes(model):
            states_1TH = body(**inputs, plan=row.plan).last_hidden_state
    else:
        states_1TH = body(**inputs).last_hidden_state
    picked_NH: Tensor = states_1TH[0].index_select(0, row.rows_N)
    return picked_NH
