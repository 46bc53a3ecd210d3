"""The routing of a mixture of experts, and its load-balancing loss.

The loss is equations 4 to 6 of Fedus et al. 2022, "Switch Transformers", as in transformers. Over the tokens of all layers:
E times the sum over experts of (share of tokens sent to the expert) x (mean probability of the expert). Even routing gives
the number of experts per token; uneven routing gives more. The shares are constants to the gradient.

We measure the shares of the global batch before its micro-batches run. The loss is then linear in the probabilities: each
expert has a price, and a micro-batch adds price times probability, summed over its tokens. So the loss does not depend on
micro-batches or ranks. It balances over the batch, not within a few sequences (Qiu et al. 2025, "Demons in the Detail").

Legend: E experts, T tokens of a row, K experts per token, I items of a micro-batch, M values per item.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.distributed import Group
from training.model.backbone import architecture, text_config


class Routing(NamedTuple):  # FSDP finds the tensors of a forward's output in a tuple, but not in a dataclass
    """Routing of some tokens, summed over layers: `sent_E` tokens per expert and the sum `probabilities_E`.

    A token counts once per sequence it is part of. Float64. Only the probabilities have gradients.
    """

    sent_E: Tensor
    probabilities_E: Tensor


class NoRouting(ModelError):
    """The model cannot report its routing: it lacks experts or a load-balancing loss."""

    code = "no-routing"


def check_experts(model: PreTrainedModel) -> None:
    """Raise NoRouting if the config of `model` lacks experts or `router_aux_loss_coef`."""
    config = text_config(model)
    if not (hasattr(config, "router_aux_loss_coef") and _experts(config)):
        raise _no_routing(model, "its config lacks experts or `router_aux_loss_coef`")


def routing_of(model: PreTrainedModel, layers: Sequence[Tensor], sequences_T: Tensor) -> Routing:
    """Return the routing of a row from the router logits, T x E per layer; `sequences_T` as in `PackedRow`.

    Raise NoRouting if the logits have another shape.
    """
    config, shapes = text_config(model), {tuple(logits_TE.shape) for logits_TE in layers}
    expected = (len(sequences_T), _experts(config))
    if shapes != {expected}:
        reported = " and ".join(map(str, sorted(shapes))) or "nothing"
        raise _no_routing(model, f"its layers report {reported} as tokens x experts, expected {expected}")
    experts_per_token, weights_T, parts = int(config.num_experts_per_tok), sequences_T.double(), []
    for logits_TE in layers:
        probabilities_TE = logits_TE.softmax(-1, dtype=torch.float32)
        chosen_TK = probabilities_TE.topk(experts_per_token).indices
        sent_TE = torch.zeros_like(probabilities_TE).scatter_(1, chosen_TK, 1.0)
        parts.append(Routing(weights_T @ sent_TE.double(), weights_T @ probabilities_TE.double()))
    return total(parts)


def total(parts: Sequence[Routing]) -> Routing:
    return Routing(*(torch.stack(tensors).sum(0) for tensors in zip(*parts, strict=True)))


class ExpertBalance:
    """The load-balancing loss of the global batch, added to an objective's loss with weight `coefficient`."""

    def __init__(self, coefficient: float, group: Group) -> None:
        self._coefficient, self._group = coefficient, group
        self._prices_E = torch.zeros(0)

    def measure(self, model: PreTrainedModel, parts: Iterable[Routing | None], count: int) -> None:
        """Set the prices from the routing of this rank's micro-batches. Collective.

        `count` is the number by which the losses of the batch are divided.
        """
        config = text_config(model)
        sent_E = torch.zeros(_experts(config), dtype=torch.float64, device=self._group.device)
        for routing in parts:
            assert routing is not None, "requires routing"
            sent_E += routing.sent_E
        sent_E = self._group.sum_(sent_E)
        tokens = sent_E.sum() / config.num_experts_per_tok
        self._prices_E = count * len(sent_E) * sent_E / tokens**2

    def added(self, values_IM: Tensor, routing: Routing | None) -> Tensor:
        """Return the values with the micro-batch's part of the loss, spread evenly over items.

        It is added to the first column and appended, unweighted, as the last one.
        """
        assert routing is not None, "requires routing"
        part_I1 = (self._prices_E @ routing.probabilities_E / len(values_IM)).expand(len(values_IM), 1)
        return torch.cat([values_IM[:, :1] + self._coefficient * part_I1, values_IM[:, 1:], part_I1], dim=1)


def _no_routing(model: PreTrainedModel, reason: str) -> NoRouting:
    return NoRouting(f"{architecture(model)} is not a mixture of experts with a load-balancing loss ({reason})")


def _experts(config: Any) -> int:
    return int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0)
