"""Which modules of a model are gathered by themselves; that they then compute the same is in test_ways.py."""

import pytest
import torch

from tests.training.model.architectures import build
from training.contract.errors import ModelError
from training.parallel.precision import AS_LOADED, Precision

MODEL = build("qwen2", {})
LAYER = "model.layers.1.self_attn.q_proj"


def kept_in_float32(*names: str) -> Precision:
    usual = {name: torch.bfloat16 for name, _ in MODEL.named_parameters()}
    return Precision(torch.bfloat16, usual | dict.fromkeys(names, torch.float32))


def test_a_layer_that_stays_in_float32_is_apart():
    found = kept_in_float32(f"{LAYER}.weight", f"{LAYER}.bias").modules_apart(MODEL)
    assert found == {MODEL.get_submodule(LAYER): torch.float32}
    assert AS_LOADED.modules_apart(MODEL) == kept_in_float32().modules_apart(MODEL) == {}


def test_a_layer_of_two_dtypes_is_refused():
    says = rf"^{LAYER} of Qwen2ForCausalLM has weights of torch.bfloat16 and torch.float32, .* `compute.parallel: ddp`"
    with pytest.raises(ModelError, match=says):
        kept_in_float32(f"{LAYER}.weight").modules_apart(MODEL)
