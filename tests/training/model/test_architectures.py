"""Shared prefixes in every architecture that is said to be verified, against plain transformers one sequence at a time.

Both log-probs and the gradient of every parameter, in float32, of the tiny models in architectures.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tests.training.model.architectures import (
    EXPERTS,
    GPT2,
    LINEAR,
    LOCAL,
    MIXED,
    MULTIMODAL,
    SCALED,
    VARIANTS,
    WINDOW,
    alone,
    build,
    build_multimodal,
    gradients,
    groups,
)
from training import distributed
from training.model.attention.prefix_support import VERIFIED, why_not_shared
from training.model.backbone import body_of, freeze_other_parts, position_limit, takes_only_text
from training.model.logprobs.response_logprobs import response_logprobs


@pytest.mark.parametrize(("kind", "changes"), [pytest.param(k, c, id=f"{k}, {what}") for k, what, c in VARIANTS])
def test_it_is_what_plain_transformers_says_of_each_sequence(kind: str, changes: dict[str, Any]):
    model = build(kind, changes)
    assert takes_only_text(model)
    assert why_not_shared(model, training=True) is None
    demand_what_plain_transformers_says(model)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", GPT2),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("openai-gpt", GPT2),
        ("biogpt", {}),
        ("gptj", GPT2 | {"rotary_dim": 4}),
        ("codegen", GPT2 | {"rotary_dim": 4, "n_ctx": 64}),
        ("llama", {}),
        ("bloom", {}),
    ],
)
def test_positions_are_as_many_as_transformers_can_run(kind: str, changes: dict[str, Any]):
    model = build(kind, changes).eval()
    limit = position_limit(model)
    assert limit == (None if kind in ("llama", "bloom") else 64)
    model(input_ids=torch.ones(1, limit or 65, dtype=torch.long), use_cache=False)
    if limit is not None:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|must match the size"):
            model(input_ids=torch.ones(1, limit + 1, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize(("kind", "changes"), [pytest.param(k, c, id=f"{k}, {what}") for k, what, c in MULTIMODAL])
def test_the_language_model_of_a_larger_one_is_what_plain_transformers_says(kind: str, changes: dict[str, Any]):
    model = build_multimodal(kind, changes)
    assert not takes_only_text(model)
    of_text = body_of(model).config.model_type
    shared = why_not_shared(model, training=True) is None
    assert shared == (of_text in VERIFIED)
    freeze_other_parts(model)
    demand_what_plain_transformers_says(model)
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, parameter in model.named_parameters() if not parameter.requires_grad} != set()


def demand_what_plain_transformers_says(model: PreTrainedModel) -> None:
    together, usual = groups(), body_of(model).config._attn_implementation
    sequences = [sequence for group in together for sequence in group]
    found = response_logprobs(model, sequences, [len(group) for group in together])
    expected = [alone(model, sequence) for sequence in sequences]
    assert found.counts_S.tolist() == [len(e) for e in expected]
    torch.testing.assert_close(found.tokens_N, torch.cat(expected), atol=2e-5, rtol=0)
    ours, plain = gradients(model, found.tokens_N), gradients(model, torch.cat(expected))
    assert ours.keys() == plain.keys()
    largest = max(float(gradient.norm()) for gradient in plain.values())
    for name, gradient in plain.items():  # some are zero but for rounding, as of a bias that all keys share
        error = (ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-2 * largest)
        assert error < 1e-5, f"{name}: {error:.1e} of a norm of {gradient.norm():.3g}"
    assert body_of(model).config._attn_implementation == usual


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("builder", "kind", "changes"),
    [
        pytest.param(builder, kind, changes, id=f"{kind}, {what}")
        for builder, cases in ((build, VARIANTS), (build_multimodal, MULTIMODAL))
        for kind, what, changes in cases
    ],
)
def test_on_a_gpu_it_is_what_a_processor_says(
    builder: Callable[[str, dict[str, Any]], PreTrainedModel], kind: str, changes: dict[str, Any]
):
    """In float32 but for rounding; in bfloat16 as near to float32 with the same weights as plain transformers on that GPU.

    As in a job: else convolutions of float32 would be rounded to 10 bits there.
    """
    model = builder(kind, changes)
    if builder is build_multimodal:
        freeze_other_parts(model)
    with distributed.group("cuda") as alone_there:
        demand_what_another_device_says(model, alone_there.device)


def demand_what_another_device_says(model: PreTrainedModel, device: torch.device) -> None:
    together = groups()
    sequences, sizes = [sequence for group in together for sequence in group], [len(group) for group in together]

    def learned(model: PreTrainedModel, tokens_N: torch.Tensor) -> list[torch.Tensor]:
        found = [tokens_N.detach(), *gradients(model, tokens_N).values()]
        return [found[0].cpu().double(), torch.cat([tensor.flatten() for tensor in found[1:]]).cpu().double()]

    def shared(model: PreTrainedModel) -> list[torch.Tensor]:
        return learned(model, response_logprobs(model, sequences, sizes).tokens_N)

    def plain(model: PreTrainedModel) -> list[torch.Tensor]:
        return learned(model, torch.cat([alone(model, sequence) for sequence in sequences]))

    for found, exact in zip(shared(copy.deepcopy(model).to(device)), plain(model), strict=True):
        assert (found - exact).norm() < 2e-5 * exact.norm()
    rounded = model.bfloat16()
    there = copy.deepcopy(rounded).to(device)
    for found, usual, exact in zip(shared(there), plain(there), plain(rounded.float()), strict=True):
        assert (found - exact).norm() < 1.5 * (usual - exact).norm()


def test_every_verified_architecture_is_verified():
    within = {body_of(build_multimodal(kind, changes)).config.model_type for kind, _, changes in MULTIMODAL}
    assert {kind for kind, _, _ in VARIANTS} | (within & VERIFIED) == VERIFIED


# Other factors for rows longer than 16 tokens, as all of them together are and hardly one alone.
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
}  # fmt: skip
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {}, "gemma2"),
    ("gpt_oss", LOCAL, "gpt_oss"),
    ("mamba", {"state_size": 4, "time_step_rank": 2}, "mamba"),
    ("stablelm", {}, "stablelm"),
    ("qwen3_next", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}, "qwen3_next"),
    ("lfm2_moe", EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "lfm2_moe"),
    ("granitemoehybrid", SCALED | LOCAL | MAMBA | {"shared_intermediate_size": 16}, "linear_attention"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8}
        | {"n_groups": 1, "chunk_size": 16},
        "nemotron_h",
    ),
    (
        "falcon_h1",
        {"lm_head_multiplier": 0.3, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_ssm": 64, "mamba_d_state": 8},
        "falcon_h1",
    ),
    ("llama4_text", {"num_local_experts": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 48}, "llama4_text"),
    ("recurrent_gemma", {"logits_soft_cap": 2.0, "num_hidden_layers": 3}, "recurrent_gemma"),
    ("phimoe", LOCAL | {"sliding_window": WINDOW}, "not told of the sliding window"),
    ("qwen2_moe", EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW}, "not told of the sliding window"),
    ("smollm3", {"layer_types": MIXED, "sliding_window": WINDOW}, "not told of the sliding window"),
    ("llama", {"attention_dropout": 0.1}, "dropout of 0.1"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "capped"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ("llama", {"rope_parameters": LONG_ROPE}, "longrope"),
]


def test_every_window_that_a_config_can_ask_for_is_verified_or_refused():
    """The sequences of a self-check are shorter than real windows, so it would not see one that is left out."""
    tried = {kind for kind, _, changes in VARIANTS if changes.get("sliding_window")}
    tried |= {f"{kind}_text" for kind, _, changes in MULTIMODAL if changes.get("sliding_window")}
    tried |= {kind for kind, changes, _ in REFUSED if changes.get("sliding_window")}
    assert {kind for kind in VERIFIED if hasattr(AutoConfig.for_model(kind), "sliding_window")} <= tried


@pytest.mark.parametrize(("kind", "changes", "why"), REFUSED, ids=[f"{k}, {w}" for k, _, w in REFUSED])
def test_what_cannot_share_runs_alone_with_the_same_result(kind: str, changes: dict[str, Any], why: str):
    model, sequences = build(kind, changes), [sequence for group in groups() for sequence in group]
    assert why in str(why_not_shared(model, training=True))
    found = response_logprobs(model, sequences, [len(group) for group in groups()])
    expected = torch.cat([alone(model, sequence) for sequence in sequences])
    torch.testing.assert_close(found.tokens_N, expected, atol=2e-5, rtol=0)


def test_dropout_keeps_sequences_apart_in_training_only():
    model = build("llama", {"attention_dropout": 0.1})
    assert why_not_shared(model, training=False) is None
    assert "dropout" in str(why_not_shared(model, training=True))
