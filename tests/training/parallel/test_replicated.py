"""Replicated master weights: norm, gradients, clipping, and the rows that a rank writes."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests import factories
from training.checkpoint.tensor_slices import LocalRows
from training.contract.config.fields import Dtype
from training.contract.config.training import Adapter
from training.distributed import ALONE
from training.parallel.model_specs import TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.replicated import Replicated


def params(folder: Path, precision: Dtype = "float32", **sizes: int) -> Replicated:
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    factories.llama(**shape | sizes).save_pretrained(folder)
    return Replicated(TrainModelSpec(folder, precision), Placement(ALONE, copies=1))


def test_norm_of_a_long_gradient_equals_float64(tmp_path):
    """Ten million numbers, mostly small. One float32 sum of their squares would be off by more than 1e-4."""
    found = params(tmp_path, vocab_size=40_000, hidden_size=128)
    random = torch.Generator().manual_seed(0)
    found.gradient_N.copy_(torch.rand(found.gradient_N.shape, generator=random) ** 6)
    exact = found.gradient_N.double().norm()
    assert abs(float(found.norm() / exact - 1)) < 1e-5
    assert all(p.grad.data_ptr() >= found.gradient_N.data_ptr() for p in found.parameters.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_of_several_passes_add_up_in_float32(tmp_path, precision: Dtype):
    """Two passes with losses a and b give the sum of torch's gradients of a and of b, in float32."""
    found = params(tmp_path, precision)
    ids = torch.arange(12).view(1, -1)
    expected = {name: torch.zeros_like(p) for name, p in found.parameters.items()}
    for factor in (1.0, 1e-3):
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=found.dtype)
        (model(ids).logits.float().square().mean() * factor).backward()
        for name, p in model.named_parameters():
            expected[name] += p.grad.float()
    found.zero()
    for factor in (1.0, 1e-3):
        found.backward(found.model(ids).logits.float().square().mean() * factor, last=factor < 1)
    assert bool(found.reduce())
    assert all(torch.equal(p.grad, expected[name]) for name, p in found.parameters.items())


def test_clip_scales_only_gradients_over_the_limit(tmp_path):
    """Four numbers of 2 have the norm 4: a limit of 8 changes nothing, a limit of 1 leaves a quarter, and zeros stay zeros."""
    found = params(tmp_path)
    found.gradient_N[:4] = 2.0
    for limit, left in ((8.0, 2.0), (1.0, 0.5)):
        found.clip_(float(found.norm()), limit)
        assert found.gradient_N[:5].tolist() == pytest.approx([left] * 4 + [0], rel=1e-6)
    found.zero()
    found.clip_(float(found.norm()), 1.0)
    assert not found.gradient_N.any()


def test_reduce_returns_false_for_a_non_finite_gradient(tmp_path):
    found = params(tmp_path)
    found.zero()
    found.backward(found.model(torch.arange(4).view(1, -1)).logits.sum() * float("inf"), last=True)
    assert not bool(found.reduce())


def test_each_copy_writes_its_part_of_the_rows():
    """Seven rows and three ranks: 0 and 1; 2 and 3; 4, 5 and 6."""
    assert [LocalRows(0, 7, 7, copy, 3).own() for copy in range(3)] == [(0, 2), (2, 4), (4, 7)]


def test_train_enables_only_the_adapters_dropout_if_the_config_has_none(tmp_path):
    params(tmp_path)
    adapted = TrainModelSpec(tmp_path, "float32", Adapter(rank=2, dropout=0.5, target_modules=("q_proj",)))
    found = Replicated(adapted, Placement(ALONE, copies=1))
    found.train()
    training = {name for name, module in found.model.named_modules() if module.training}
    dropout = "model.layers.0.self_attn.q_proj.lora_dropout"
    assert training == {dropout, f"{dropout}.default"}
