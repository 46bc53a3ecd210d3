"""The load-balancing loss. Oracle: transformers' loss of full sequences in padded rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests import factories
from tests.training.model.architectures import LOCAL, MULTIMODAL, VARIANTS, build, build_multimodal, groups
from training.contract.config.recipe import Compute
from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter
from training.distributed import ALONE
from training.model.attention.shared_prefix import TokenSequence
from training.model.backbone import text_config
from training.model.expert_routing import ExpertBalance, Routing, check_experts
from training.model.logprobs.response_logprobs import collate, logprobs_of
from training.model.training_setup import check_trainable, prepare_for_training

CHANGES = {kind: changes for kind, _, changes in VARIANTS}
# Architectures with a coefficient in their config. The "attention only" Granite hybrid lacks experts.
BALANCED = [
    pytest.param(builder, kind, changes, id=f"{kind}, {what}")
    for builder, variants in (
        (build, [*VARIANTS, ("gpt_oss", "a sequence a row", LOCAL)]),
        (build_multimodal, MULTIMODAL),
    )
    for kind, what, changes in variants
    if hasattr(AutoConfig.for_model(kind).get_text_config(), "router_aux_loss_coef") and what != "attention only"
]


def routing(model: PreTrainedModel, parts: list[list[TokenSequence]]) -> Routing:
    sequences = [sequence for part in parts for sequence in part]
    found = logprobs_of(model, collate(model, sequences, [len(part) for part in parts]), routing=True).routing
    assert found is not None
    return found


def loss_by_transformers(model: PreTrainedModel, sequences: list[TokenSequence]) -> torch.Tensor:
    """Return transformers' loss of the sequences, without the tokens after the predictor of the last response token."""
    runs = [s.ids_T[: int(s.mask_T.nonzero()[-1]) if s.mask_T.any() else 1] for s in sequences]
    ids_ST = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True)
    mask_ST = torch.nn.utils.rnn.pad_sequence([torch.ones_like(run) for run in runs], batch_first=True)
    config = text_config(model)
    logits = model(input_ids=ids_ST, attention_mask=mask_ST, output_router_logits=True).router_logits
    return load_balancing_loss_func(logits, logits[0].shape[-1], config.num_experts_per_tok, mask_ST)


@pytest.mark.parametrize(("builder", "kind", "changes"), BALANCED)
def test_loss_and_gradients_equal_transformers(
    builder: Callable[[str, dict[str, Any]], PreTrainedModel], kind: str, changes: dict[str, Any]
):
    """A micro-batch of 5 items in a batch of 7. Up to three sequences share a prompt. transformers' gradients are float32."""
    model, together, balance = builder(kind, changes), groups(), ExpertBalance(0.3, ALONE)
    found = routing(model, together)
    balance.measure(model, [found], count=7)
    values_I3 = balance.added(torch.tensor([[1.0, 2.0]] * 5, dtype=torch.float64), found)
    expected = loss_by_transformers(model, [sequence for part in together for sequence in part])
    assert values_I3[:, 2].sum().item() / 7 == pytest.approx(expected.item(), rel=1e-6)
    assert values_I3[:, 0].sum().item() / 7 == pytest.approx(5 / 7 + 0.3 * expected.item(), rel=1e-6)
    assert values_I3[:, 1].tolist() == [2.0] * 5
    found_gradients, exact = gradients_of(model, values_I3[:, 0].sum() / 7), gradients_of(model, 0.3 * expected)
    assert found_gradients.keys() == exact.keys()
    largest = max(float(gradient.norm()) for gradient in exact.values())
    for name, gradient in exact.items():
        error = (found_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-2 * largest)
        assert error < 3e-5, f"{name}: {error:.1e} of a norm of {gradient.norm():.3g}"


def gradients_of(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the nonzero gradients. In plain transformers some parameters get zeros from another output."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def test_losses_of_micro_batches_sum_to_the_loss_of_the_batch():
    """Single micro-batches have other balances."""
    model, parts = build("qwen3_moe", CHANGES["qwen3_moe"]), groups()
    balance, zero = ExpertBalance(1.0, ALONE), torch.zeros(1, 1, dtype=torch.float64)
    routings = [routing(model, [part]) for part in parts]
    balance.measure(model, routings, count=1)
    sum_of_parts = sum(balance.added(zero, part)[0, 0].item() for part in routings)
    batch_loss = loss_by_transformers(model, [sequence for part in parts for sequence in part]).item()
    alone = [loss_by_transformers(model, part).item() for part in parts]
    assert sum_of_parts == pytest.approx(batch_loss, rel=1e-6)
    assert max(alone) - min(alone) > 0.01


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("granitemoehybrid", {"num_local_experts": 0})])
def test_check_experts_raises_for_a_model_without_experts(kind: str, changes: dict[str, Any]):
    model = build(kind, CHANGES[kind] | changes)
    with pytest.raises(ModelError, match=r"ForCausalLM .*`router_aux_loss_coef`.* \[no-routing\]"):
        check_experts(model)


@pytest.mark.parametrize(
    ("kind", "changes", "shapes"),
    [
        ("qwen2_moe", CHANGES["qwen2_moe"] | {"mlp_only_layers": [0, 1]}, r"nothing .*, 4\)"),
        (
            "doge",
            {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
            r"\(2, 19, 4\) .*\(19, 16\)",
        ),
    ],
)
def test_router_logits_of_another_shape_raise(kind: str, changes: dict[str, Any], shapes: str):
    """A model without experts in its layers, and one with router logits of its own kind; before training and at its start."""
    model = build(kind, changes)
    any_length = shapes.replace("19", r"\d+")
    with pytest.raises(ModelError, match=rf"^`training.router_aux_loss_coef`: .*{any_length}.* 0 \[no-routing\]$"):
        check_trainable(model, factories.recipe(training={"router_aux_loss_coef": 0.1}))
    with pytest.raises(ModelError, match=rf"^`reference.sft.router_aux_loss_coef`: .*{any_length}.* \[no-routing\]$"):
        prepare_for_training(model, Compute(), EventWriter(None), own_dropout=False, routing="reference.sft")
    with pytest.raises(ModelError, match=rf"{shapes}.* \[no-routing\]$"):
        routing(model, groups())
