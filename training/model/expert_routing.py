"""How a mixture of experts spreads tokens, and the loss that asks for an even spread.

Fedus et al. 2022, "Switch Transformers", equations 4 to 6, as transformers computes it: over the tokens of all layers
together, E times the sum over experts of the share of tokens sent to an expert times its mean probability. Where routing is
even that is the number of experts a token is sent to, and more where experts are both chosen often and probable. The shares
are constants to the gradient.

With shares of the whole batch, known before its micro-batches run, the loss is linear in the probabilities: each expert has a
price, and a micro-batch adds price times probability, summed over its tokens. So it depends on neither micro-batches nor ranks,
and asks for balance over the batch, not within every few sequences (Qiu et al. 2025, "Demons in the Detail").

Legend: E experts, T tokens of a row.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.distributed import Group
from training.model.backbone import architecture, text_config


class Routing(NamedTuple):  # FSDP finds the tensors of what a pass returns in a tuple, and not in a dataclass
    """Of some tokens in all layers: `sent_E` counts those sent to an expert, `probabilities_E` sums its probabilities.

    A token counts once for each sequence that it is part of. Float64; gradients flow through the probabilities alone.
    """

    sent_E: Tensor
    probabilities_E: Tensor


class NoRouting(ModelError):
    """Passes of a model cannot tell where its tokens went: it has no experts that a loss could balance, or others."""


def check_experts(model: PreTrainedModel) -> None:
    """Raise NoRouting if the configuration of `model` knows of no experts that are balanced by a loss."""
    config = text_config(model)
    if not (hasattr(config, "router_aux_loss_coef") and _experts(config)):
        raise _refused(model, "its configuration has no `router_aux_loss_coef`, or no experts")


def routing_of(model: PreTrainedModel, layers: Sequence[Tensor], sequences_T: Tensor) -> Routing:
    """The routing of a row, from its router's logits, T x E in each layer; `sequences_T` as in `Row`. Raises NoRouting."""
    config, shapes = text_config(model), {tuple(logits_TE.shape) for logits_TE in layers}
    if shapes != {(len(sequences_T), _experts(config))}:
        told = " and ".join(map(str, sorted(shapes))) or "nothing"
        raise _refused(model, f"of {len(sequences_T)} tokens and {_experts(config)} experts its layers report {told}")
    each, weights_T, parts = int(config.num_experts_per_tok), sequences_T.double(), []
    for logits_TE in layers:
        probabilities_TE = logits_TE.softmax(-1, dtype=torch.float32)
        sent_TE = torch.zeros_like(probabilities_TE).scatter_(1, probabilities_TE.topk(each).indices, 1.0)
        parts.append(Routing(weights_T @ sent_TE.double(), weights_T @ probabilities_TE.double()))
    return total(parts)


def total(parts: Sequence[Routing]) -> Routing:
    return Routing(*(torch.stack(of_parts).sum(0) for of_parts in zip(*parts, strict=True)))


class ExpertBalance:
    """The loss of the global batch that asks for an even spread, times `coefficient`, beside an objective's own loss."""

    def __init__(self, coefficient: float, group: Group) -> None:
        self._coefficient, self._group = coefficient, group
        self._prices_E = torch.zeros(0)

    def measure(self, model: PreTrainedModel, parts: Iterable[Routing | None], count: int) -> None:
        """Set the prices from this rank's micro-batches of a batch whose losses are divided by `count`. Every rank calls it."""
        config = text_config(model)
        sent_E = torch.zeros(_experts(config), dtype=torch.float64, device=self._group.device)
        for routing in parts:
            assert routing is not None, "routing was not asked for"
            sent_E += routing.sent_E
        sent_E = self._group.sum_(sent_E)
        tokens = sent_E.sum() / config.num_experts_per_tok
        self._prices_E = count * len(sent_E) * sent_E / tokens**2

    def added(self, values_IM: Tensor, routing: Routing | None) -> Tensor:
        """The values of a micro-batch with its part of the loss, shared out evenly: in the first column, and as the last."""
        assert routing is not None, "routing was not asked for"
        part_I1 = (self._prices_E @ routing.probabilities_E / len(values_IM)).expand(len(values_IM), 1)
        return torch.cat([values_IM[:, :1] + self._coefficient * part_I1, values_IM[:, 1:], part_I1], dim=1)


def _refused(model: PreTrainedModel, why: str) -> NoRouting:
    return NoRouting(f"{architecture(model)} is no mixture of experts with a load-balancing loss ({why})")


def _experts(config: Any) -> int:
    return int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0)
