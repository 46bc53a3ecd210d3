"""The balance of experts. Oracle: transformers' own loss, of whole sequences in padded rows, wherever there is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

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
# Those with a coefficient in their configuration; the hybrid of Granite as it stands there has no experts.
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
    """Of each sequence all but what comes after the token that predicts its last response token: that is never run."""
    runs = [s.ids_T[: int(s.mask_T.nonzero()[-1]) if s.mask_T.any() else 1] for s in sequences]
    ids_ST = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True)
    mask_ST = torch.nn.utils.rnn.pad_sequence([torch.ones_like(run) for run in runs], batch_first=True)
    config = text_config(model)
    logits = model(input_ids=ids_ST, attention_mask=mask_ST, output_router_logits=True).router_logits
    return load_balancing_loss_func(logits, logits[0].shape[-1], config.num_experts_per_tok, mask_ST)


@pytest.mark.parametrize(("builder", "kind", "changes"), BALANCED)
def test_it_is_what_transformers_says_of_whole_sequences(
    builder: Callable[[str, dict[str, Any]], PreTrainedModel], kind: str, changes: dict[str, Any]
):
    """The loss and the gradient of every parameter, for which transformers adds up float32; with prompts that up to three
    sequences share. It is a micro-batch of 5 items in a batch of 7, by which the sum of the values is divided."""
    model, together, balance = builder(kind, changes), groups(), ExpertBalance(0.3, ALONE)
    found = routing(model, together)
    balance.measure(model, [found], count=7)
    values_I3 = balance.added(torch.tensor([[1.0, 2.0]] * 5, dtype=torch.float64), found)
    expected = loss_by_transformers(model, [sequence for part in together for sequence in part])
    assert values_I3[:, 2].sum().item() / 7 == pytest.approx(expected.item(), rel=1e-6)
    assert values_I3[:, 0].sum().item() / 7 == pytest.approx(5 / 7 + 0.3 * expected.item(), rel=1e-6)
    assert values_I3[:, 1].tolist() == [2.0] * 5
    ours, theirs = gradients_of(model, values_I3[:, 0].sum() / 7), gradients_of(model, 0.3 * expected)
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-2 * largest)
        assert error < 3e-5, f"{name}: {error:.1e} of a norm of {gradient.norm():.3g}"


def gradients_of(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those that are not zero: some parameters of plain transformers get a gradient of zeros from another output."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def test_a_batch_in_parts_has_the_loss_of_the_whole():
    """Though each part's own balance is another."""
    model, parts = build("qwen3_moe", CHANGES["qwen3_moe"]), groups()
    balance, none = ExpertBalance(1.0, ALONE), torch.zeros(1, 1, dtype=torch.float64)
    of_parts = [routing(model, [part]) for part in parts]
    balance.measure(model, of_parts, count=1)
    in_parts = sum(balance.added(none, part)[0, 0].item() for part in of_parts)
    whole = loss_by_transformers(model, [sequence for part in parts for sequence in part]).item()
    alone = [loss_by_transformers(model, part).item() for part in parts]
    assert in_parts == pytest.approx(whole, rel=1e-6)
    assert max(alone) - min(alone) > 0.01


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("granitemoehybrid", {"num_local_experts": 0})])
def test_a_model_without_experts_is_refused(kind: str, changes: dict[str, Any]):
    model = build(kind, CHANGES[kind] | changes)
    with pytest.raises(ModelError, match=r"ForCausalLM is no mixture of experts .*its configuration has no"):
        check_experts(model)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("qwen2_moe", CHANGES["qwen2_moe"] | {"mlp_only_layers": [0, 1]}, r"4 experts its layers report nothing"),
        (
            "doge",
            {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
            r"of 19 tokens and 16 experts its layers report \(2, 19, 4\)",
        ),
    ],
)
def test_layers_that_report_something_else_are_refused(kind: str, changes: dict[str, Any], told: str):
    """None of whose layers has its experts, and one with experts of its own kind; before training and at its start."""
    model = build(kind, changes)
    counted = told.replace("19", r"\d+")
    with pytest.raises(ModelError, match=rf"^`training.router_aux_loss_coef`: .*{counted}\): set it to 0$"):
        check_trainable(model, {"training": {"router_aux_loss_coef": 0.1}})
    with pytest.raises(ModelError, match=rf"^`reference.sft.router_aux_loss_coef`: .*{counted}"):
        prepare_for_training(model, Compute(), EventWriter(None), own_dropout=False, routing="reference.sft")
    with pytest.raises(ModelError, match=told):
        routing(model, groups())
