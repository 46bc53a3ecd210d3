"""The modules that are gathered separately. test_ways.py tests that the results are the same."""

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


def test_a_layer_kept_in_float32_is_gathered_separately():
    found = kept_in_float32(f"{LAYER}.weight", f"{LAYER}.bias").modules_apart(MODEL)
    assert found == {MODEL.get_submodule(LAYER): torch.float32}
    assert AS_LOADED.modules_apart(MODEL) == kept_in_float32().modules_apart(MODEL) == {}


def test_a_layer_of_two_dtypes_raises():
    values = rf"^{LAYER} of Qwen2ForCausalLM .* torch.bfloat16 and torch.float32; .* \[mixed-dtypes\]"
    with pytest.raises(ModelError, match=values):
        kept_in_float32(f"{LAYER}.weight").modules_apart(MODEL)
