"""The head of a causal language model, which turns hidden states into logits: its parts, found in a model.

tiles.py computes with them. With an adapter on the head (training.model.adapter) the head's own weight is frozen, and a
low-rank product is added to its output.

Legend: N rows, H hidden size, V vocabulary, R rank of an adapter.
"""

from dataclasses import dataclass

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.errors import ModelError

HEAD_OPTIONS = "head_options"  # the attribute of a model that holds them, set by prepare.py


@dataclass(frozen=True)
class HeadOptions:
    """How tiles are computed: in training with products of 8-bit floats; by compiled functions."""

    float8: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to the logits: `scale * up @ down @ dropout(hidden)`."""

    down_RH: Tensor
    up_VR: Tensor
    scale: float
    dropout: torch.nn.Module

    def project(self, hidden_NH: Tensor) -> Tensor:
        return self.scale * (self.dropout(hidden_NH) @ self.down_RH.T)


@dataclass(frozen=True)
class Head:
    """`softcap(scale * (hidden @ weight.T + bias))` are the logits; `low_rank` is added to the product before scaling."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    low_rank: LowRank | None = None
    options: HeadOptions = HeadOptions()


def head_of(model: PreTrainedModel) -> Head:
    """The head of a causal language model. Raises ModelError if it is not one linear map."""
    found, config = model.get_output_embeddings(), model.config
    head = found.get_base_layer() if isinstance(found, LoraLinear) else found
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"the output layer of {type(model).__name__} is {type(head).__name__}; expected one torch.nn.Linear, from "
            f"which log-probs are computed a part of the vocabulary at a time: use another base model"
        )
    multiplier = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    scale = (1.0 if multiplier is None else multiplier) / (1.0 if divisor is None else divisor)
    softcap, options = getattr(config, "final_logit_softcapping", None), getattr(model, HEAD_OPTIONS, HeadOptions())
    return Head(head.weight, head.bias, scale, softcap, _low_rank(found), options)


def _low_rank(head: torch.nn.Module) -> LowRank | None:
    """The adapter of the head, if there is one and it is switched on."""
    if not isinstance(head, LoraLinear) or head.disable_adapters:
        return None
    [name] = head.active_adapters
    return LowRank(head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name], head.lora_dropout[name])
