"""Shared prefixes in every verified architecture, compared with plain transformers, one sequence at a time.

The tests compare log-probs and the gradient of every parameter in float32, for the tiny models of architectures.py.
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
def test_verified_architecture_equals_plain_transformers(kind: str, changes: dict[str, Any]):
    model = build(kind, changes)
    assert takes_only_text(model)
    assert why_not_shared(model, training=True) is None
    assert_equal_to_plain_transformers(model)


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
def test_position_limit_is_the_longest_sequence_transformers_runs(kind: str, changes: dict[str, Any]):
    model = build(kind, changes).eval()
    limit = position_limit(model)
    assert limit == (None if kind in ("llama", "bloom") else 64)
    model(input_ids=torch.ones(1, limit or 65, dtype=torch.long), use_cache=False)
    if limit is not None:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|must match the size"):
            model(input_ids=torch.ones(1, limit + 1, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize(("kind", "changes"), [pytest.param(k, c, id=f"{k}, {what}") for k, what, c in MULTIMODAL])
def test_multimodal_model_equals_plain_transformers_on_text(kind: str, changes: dict[str, Any]):
    model = build_multimodal(kind, changes)
    assert not takes_only_text(model)
    text_type = body_of(model).config.model_type
    shared = why_not_shared(model, training=True) is None
    assert shared == (text_type in VERIFIED)
    freeze_other_parts(model)
    assert_equal_to_plain_transformers(model)
    without_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert without_gradient == frozen != set()


def assert_equal_to_plain_transformers(model: PreTrainedModel) -> None:
    together, usual = groups(), body_of(model).config._attn_implementation
    sequences = [sequence for group in together for sequence in group]
    found = response_logprobs(model, sequences, [len(group) for group in together])
    expected = [alone(model, sequence) for sequence in sequences]
    assert found.counts_S.tolist() == [len(e) for e in expected]
    torch.testing.assert_close(found.tokens_N, torch.cat(expected), atol=2e-5, rtol=0)
    shared, plain = gradients(model, found.tokens_N), gradients(model, torch.cat(expected))
    assert shared.keys() == plain.keys()
    largest = max(float(gradient.norm()) for gradient in plain.values())
    for name, gradient in plain.items():  # some are zero but for rounding, for example of the bias of keys
        error = (shared[name] - gradient).norm() / gradient.norm().clamp(min=1e-2 * largest)
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
def test_on_a_gpu_results_equal_those_on_a_cpu(
    builder: Callable[[str, dict[str, Any]], PreTrainedModel], kind: str, changes: dict[str, Any]
):
    """In float32 equal but for rounding; in bfloat16 as close to float32 as plain transformers on the same GPU.

    The group of a job keeps float32 convolutions exact; by default the GPU would round them to 10 bits.
    """
    model = builder(kind, changes)
    if builder is build_multimodal:
        freeze_other_parts(model)
    with distributed.group("cuda") as gpu_group:
        assert_equal_on_device(model, gpu_group.device)


def assert_equal_on_device(model: PreTrainedModel, device: torch.device) -> None:
    together = groups()
    sequences, sizes = [sequence for group in together for sequence in group], [len(group) for group in together]

    def with_gradients(model: PreTrainedModel, tokens_N: torch.Tensor) -> list[torch.Tensor]:
        found = [tokens_N.detach(), *gradients(model, tokens_N).values()]
        return [found[0].cpu().double(), torch.cat([tensor.flatten() for tensor in found[1:]]).cpu().double()]

    def shared(model: PreTrainedModel) -> list[torch.Tensor]:
        return with_gradients(model, response_logprobs(model, sequences, sizes).tokens_N)

    def plain(model: PreTrainedModel) -> list[torch.Tensor]:
        return with_gradients(model, torch.cat([alone(model, sequence) for sequence in sequences]))

    for found, exact in zip(shared(copy.deepcopy(model).to(device)), plain(model), strict=True):
        assert (found - exact).norm() < 2e-5 * exact.norm()
    rounded = model.bfloat16()
    on_device = copy.deepcopy(rounded).to(device)
    for found, usual, exact in zip(shared(on_device), plain(on_device), plain(rounded.float()), strict=True):
        assert (found - exact).norm() < 1.5 * (usual - exact).norm()


def test_verified_lists_exactly_the_tested_architectures():
    text_types = {body_of(build_multimodal(kind, changes)).config.model_type for kind, _, changes in MULTIMODAL}
    assert {kind for kind, _, _ in VARIANTS} | (text_types & VERIFIED) == VERIFIED


# Other factors for rows over 16 tokens: all sequences in one row are longer, most single ones are not.
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
    ("phimoe", LOCAL | {"sliding_window": WINDOW}, "sliding window"),
    ("qwen2_moe", EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW}, "sliding window"),
    ("smollm3", {"layer_types": MIXED, "sliding_window": WINDOW}, "sliding window"),
    ("llama", {"attention_dropout": 0.1}, "dropout of 0.1"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "capped"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ("llama", {"rope_parameters": LONG_ROPE}, "longrope"),
]


def test_sliding_windows_of_verified_architectures_are_all_tested():
    """The self-check would not find a missing window: its sequences are shorter than real windows."""
    tested = {kind for kind, _, changes in VARIANTS if changes.get("sliding_window")}
    tested |= {f"{kind}_text" for kind, _, changes in MULTIMODAL if changes.get("sliding_window")}
    tested |= {kind for kind, changes, _ in REFUSED if changes.get("sliding_window")}
    assert {kind for kind in VERIFIED if hasattr(AutoConfig.for_model(kind), "sliding_window")} <= tested


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[f"{k}, {r}" for k, _, r in REFUSED])
def test_models_without_sharing_give_the_log_probs_of_plain_transformers(
    kind: str, changes: dict[str, Any], reason: str
):
    model, sequences = build(kind, changes), [sequence for group in groups() for sequence in group]
    assert reason in str(why_not_shared(model, training=True))
    found = response_logprobs(model, sequences, [len(group) for group in groups()])
    expected = torch.cat([alone(model, sequence) for sequence in sequences])
    torch.testing.assert_close(found.tokens_N, expected, atol=2e-5, rtol=0)


def test_attention_dropout_prevents_sharing_in_training_only():
    model = build("llama", {"attention_dropout": 0.1})
    assert why_not_shared(model, training=False) is None
    assert "dropout" in str(why_not_shared(model, training=True))
