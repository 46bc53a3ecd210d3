"""transformers has the attributes that we replace, and uses our replacements."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import modeling_utils
from transformers.integrations import sdpa_attention

from training.model.transformers_patches import _but_not_in_float32, read_without_mapping, repeat_keys_in_float32


@pytest.mark.parametrize(
    ("device", "dtype", "in_groups"),
    [("cpu", torch.float32, True), ("cuda", torch.bfloat16, True), ("cuda", torch.float32, False)],
)
def test_use_gqa_in_float32_on_a_gpu_is_false(monkeypatch: pytest.MonkeyPatch, device, dtype, in_groups):
    """The tensors have no values, so no GPU is needed."""
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda mask, key, value: True)
    repeat_keys_in_float32()
    with FakeTensorMode():
        key = torch.empty(1, 2, 3, 4, device=device, dtype=dtype)
        assert sdpa_attention.use_gqa_in_sdpa(None, key, key) is in_groups


def test_sdpa_attention_calls_use_gqa(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def ask(mask, key, value):
        asked.append(key.shape)
        return True

    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", _but_not_in_float32(ask))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    query, key = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    sdpa_attention.sdpa_attention_forward(module, query, key, key, None)
    assert asked == [key.shape]


def test_read_without_mapping_restores_the_attribute():
    """test_own_memory.py shows its effect: no file is mapped."""
    original = modeling_utils.safe_open
    with read_without_mapping():
        assert modeling_utils.safe_open is not original
    assert modeling_utils.safe_open is original
