"""Masters: the norm of a gradient of millions of numbers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.masters import Masters


def test_the_norm_of_a_long_gradient_is_that_of_float64(tmp_path):
    """Ten million numbers, most of them small: summed up in one go in float32 their norm is off by 1e-4 and more."""
    config = LlamaConfig(vocab_size=40_000, hidden_size=128, intermediate_size=8, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    masters = Masters(tmp_path, "float32", torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    values = torch.rand(masters.gradient_N.shape, generator=random) ** 6
    masters.gradient_N.copy_(values)
    exact = values.double().norm()
    assert abs(float(masters.gradient_norm() / exact - 1)) < 1e-5
    assert all(p.grad.data_ptr() >= masters.gradient_N.data_ptr() for p in masters.parameters.values())
