"""Shared prefixes in every architecture that is said to be verified, against plain transformers one sequence at a time.

Both log-probs and the gradient of every parameter, in float32. The tiny models have random weights, windows shorter than
the sequences where they have windows, and everything switched on that could tell one sequence from another.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from training.model.attention import VERIFIED, why_not_shared
from training.model.logprobs import response_logprobs
from training.model.prefix import TokenSequence

VOCABULARY = 97
WINDOW = 6
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "attention_dropout": 0.0,
}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# What these models are built of: latent keys and values, experts by groups, experts, and numbers that scale what flows.
LATENT = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALED = {"logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "untied", {}),
    ("llama", "tied", {"tie_word_embeddings": True}),
    ("llama", "rope of llama 3", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}),
    ("mistral", "full", {"sliding_window": None}),
    ("mistral", "window", {"sliding_window": WINDOW}),
    ("mixtral", "experts", LOCAL | {"sliding_window": WINDOW}),
    ("qwen2", "full", {}),
    ("qwen2", "window", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ("qwen3", "full", {}),
    ("qwen3", "window", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ("qwen2_moe", "experts", EXPERTS | {"shared_expert_intermediate_size": 16}),
    ("qwen3_moe", "experts", EXPERTS),
    ("qwen3_moe", "window", EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW}),
    ("olmo", "full", {}),
    ("olmo2", "full", {}),
    ("olmo3", "window", {"layer_types": MIXED, "sliding_window": WINDOW}),
    ("phi", "bias in the head", {}),
    ("phi3", "full", {"sliding_window": None}),
    ("phi3", "window", {"sliding_window": WINDOW}),
    ("cohere", "logit scale", {"logit_scale": 0.0625}),
    ("cohere2", "window", {"layer_types": MIXED, "sliding_window": WINDOW, "logit_scale": 0.25}),
    ("granite", "logit scale", SCALED),
    ("gemma", "tied", {}),
    ("gemma3_text", "window", {"layer_types": MIXED, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    ("gemma3_text", "softcap", {"layer_types": MIXED, "sliding_window": WINDOW, "final_logit_softcapping": 2.0}),
    ("glm4", "full", {}),
    ("smollm3", "layers without positions", {"no_rope_layers": [1, 0]}),
    ("smollm3", "window", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}),
    ("starcoder2", "window", {"sliding_window": WINDOW}),
    ("apertus", "full", {}),
    ("arcee", "full", {}),
    ("cwm", "window", {"layer_types": MIXED, "sliding_window": WINDOW}),
    ("deepseek_v2", "latent attention", LATENT | ROUTED),
    ("deepseek_v3", "latent attention", LATENT | ROUTED | {"routed_scaling_factor": 1.7}),
    ("dots1", "window", ROUTED | {"layer_types": MIXED, "sliding_window": WINDOW}),
    ("ernie4_5", "bias", {"use_bias": True}),
    ("ernie4_5_moe", "experts", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1}),
    ("exaone4", "window", {"layer_types": MIXED, "sliding_window": WINDOW}),
    ("flex_olmo", "experts", EXPERTS),
    ("glm", "half rotary", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("glm4_moe", "experts", ROUTED | {"use_qk_norm": True}),
    ("glm4_moe_lite", "latent attention", LATENT | ROUTED),
    ("granitemoe", "experts", SCALED | LOCAL),
    ("granitemoeshared", "experts", SCALED | LOCAL | {"shared_intermediate_size": 16}),
    ("granitemoehybrid", "attention only", SCALED | {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 16, "mamba_d_head": 64,
        "layer_types": ["attention"] * 2, "mamba_n_heads": 1, "position_embedding_type": "rope"}),
    ("helium", "full", {}),
    ("hunyuan_v1_dense", "full", {}),
    ("hunyuan_v1_moe", "experts", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16}),
    ("internlm3", "bias", {"qkv_bias": True, "bias": True}),
    ("minimax_m2", "experts", LOCAL),
    ("ministral", "window", {"layer_types": MIXED, "sliding_window": WINDOW}),
    ("ministral3", "queries scaled by position", {"sliding_window": WINDOW, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5}}),
    ("nanochat", "softcap", {"final_logit_softcapping": 2.0}),
    ("olmoe", "experts", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    ("opt", "learned positions", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    ("phimoe", "bias in the head", {"sliding_window": None, "lm_head_bias": True} | LOCAL),
    ("seed_oss", "bias", {"attention_bias": True, "attention_out_bias": True}),
    ("gpt2", "learned positions", GPT2),
    ("gpt2", "scaled by layer", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", "parallel", {"hidden_dropout": 0.0}),
]  # fmt: skip


def build(kind: str, changes: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(COMMON | changes)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases: away from one and zero, which would hide a mistake
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    return model.eval()


def groups() -> list[list[TokenSequence]]:
    """A pair, three responses, one, a response within another, and two alike; prefixes that reach into responses."""
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=random)

    def group(prompt: int, same: int, *responses: int) -> list[TokenSequence]:
        start = tokens(prompt + same)
        sequences = [torch.cat([start, tokens(count)]) for count in responses]
        return [TokenSequence(ids, torch.arange(len(ids)) >= prompt) for ids in sequences]

    twin = group(5, 0, 7)[0]
    inner = TokenSequence(twin.ids_T[:9], twin.mask_T[:9])
    turns = group(4, 0, 9)[0]
    gaps = TokenSequence(turns.ids_T, torch.tensor([True, False] * 6 + [False]))
    nothing = TokenSequence(tokens(6), torch.zeros(6, dtype=torch.bool))
    return [group(9, 0, 11, 5), group(3, 4, 2, 8, 6), group(12, 0, 9), [twin, inner, twin], [gaps, nothing]]


def alone(model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    logprobs_TV = model(input_ids=sequence.ids_T[None]).logits[0, :-1].log_softmax(-1)
    return logprobs_TV.gather(1, sequence.ids_T[1:, None])[:, 0][sequence.mask_T[1:]]


def gradients(model: PreTrainedModel, tokens_N: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(tokens_N), dtype=tokens_N.dtype) + 0.3
    (tokens_N * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "changes"), [pytest.param(k, c, id=f"{k}, {what}") for k, what, c in VARIANTS])
def test_it_is_what_plain_transformers_says_of_each_sequence(kind: str, changes: dict[str, Any]):
    model, together = build(kind, changes), groups()
    assert why_not_shared(model, training=True) is None
    usual = model.config._attn_implementation
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
    assert model.config._attn_implementation == usual


def test_every_verified_architecture_is_verified():
    assert {kind for kind, _, _ in VARIANTS} == VERIFIED


# Other factors for rows longer than 16 tokens, as all of them together are and hardly one alone.
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {}, "gemma2"),
    ("gpt_oss", LOCAL, "gpt_oss"),
    ("mamba", {"state_size": 4, "time_step_rank": 2}, "mamba"),
    ("stablelm", {}, "stablelm"),
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
    tried |= {kind for kind, changes, _ in REFUSED if changes.get("sliding_window")}
    assert {kind for kind in VERIFIED if hasattr(AutoConfig.for_model(kind), "sliding_window")} <= tried


@pytest.mark.parametrize(("kind", "changes", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
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
