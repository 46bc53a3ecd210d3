"""The head of a causal language model: its parts, found in a model. It turns hidden states into logits.

logprob_tiles.py computes with these parts. With an adapter on the head (training.model.adapter) the head's weight is frozen,
and a low-rank product is added to its output.

Legend: N rows, H hidden size, V vocabulary, R rank of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from training.contract.errors import ModelError
from training.model.backbone import architecture, text_config

HEAD_OPTIONS = "head_options"  # the attribute of a model with its `HeadOptions`, set by training_setup.py
# Names of `Head`'s numbers in transformers' configs. If a name means something else in a model, the self-check fails.
_MULTIPLIERS, _DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class HeadOptions:
    """How tiles are computed. `float8`: in training, products of 8-bit floats; `compiled`: compiled functions."""

    float8: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class LowRank:
    """An adapter's addition to the logits: `scale * up @ down @ dropout(hidden)`."""

    down_RH: Tensor
    up_VR: Tensor
    scale: float
    dropout: torch.nn.Module

    def project(self, hidden_NH: Tensor) -> Tensor:
        return self.scale * (self.dropout(hidden_NH) @ self.down_RH.T)


@dataclass(frozen=True)
class Head:
    """The logits are `softcap(scale * (hidden @ weight.T + bias))`. `low_rank` is added to the product before scaling."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    low_rank: LowRank | None = None
    options: HeadOptions = HeadOptions()


def head_of(model: PreTrainedModel) -> Head:
    """Return the head of a causal language model. Raise ModelError if it is not one linear map."""
    layer, config = model.get_output_embeddings(), text_config(model)
    head = layer.get_base_layer() if isinstance(layer, LoraLinear) else layer
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"the output layer of {architecture(model)} is {type(head).__name__}; expected torch.nn.Linear: use another "
            "base model",
            "unsupported-head",
        )
    scale = _first_set(config, _MULTIPLIERS, 1.0) / _first_set(config, _DIVISORS, 1.0)
    softcap, options = _first_set(config, _CAPS, None), getattr(model, HEAD_OPTIONS, HeadOptions())
    return Head(head.weight, head.bias, scale, softcap, _low_rank(layer), options)


def _first_set(config: PreTrainedConfig, names: Sequence[str], default: Any) -> Any:
    """Return the first of these fields with a value in the config."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _low_rank(head: torch.nn.Module) -> LowRank | None:
    """Return the head's adapter if it has one that is enabled."""
    if not isinstance(head, LoraLinear) or head.disable_adapters:
        return None
    [name] = head.active_adapters
    return LowRank(head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name], head.lora_dropout[name])
