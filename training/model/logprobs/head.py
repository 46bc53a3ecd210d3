"""The head of a causal language model, which turns hidden states into logits: its parts, found in a model.

logprob_tiles.py computes with them. With an adapter on the head (training.model.adapter) the head's own weight is frozen, and a
low-rank product is added to its output.

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

HEAD_OPTIONS = "head_options"  # the attribute of a model that holds them, set by training_setup.py
# What the configs of transformers' models call the numbers of `Head`; if a name means something else, the self-check finds out.
_MULTIPLIERS, _DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")


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
    found, config = model.get_output_embeddings(), text_config(model)
    head = found.get_base_layer() if isinstance(found, LoraLinear) else found
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"the output layer of {architecture(model)} is {type(head).__name__}; expected one torch.nn.Linear, from "
            f"which log-probs are computed a part of the vocabulary at a time: use another base model"
        )
    scale = _first(config, _MULTIPLIERS, 1.0) / _first(config, _DIVISORS, 1.0)
    softcap, options = _first(config, _CAPS, None), getattr(model, HEAD_OPTIONS, HeadOptions())
    return Head(head.weight, head.bias, scale, softcap, _low_rank(found), options)


def _first(config: PreTrainedConfig, names: Sequence[str], default: Any) -> Any:
    """The first of these fields that the config has and that is set."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _low_rank(head: torch.nn.Module) -> LowRank | None:
    """The adapter of the head, if there is one and it is switched on."""
    if not isinstance(head, LoraLinear) or head.disable_adapters:
        return None
    [name] = head.active_adapters
    return LowRank(head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name], head.lora_dropout[name])
