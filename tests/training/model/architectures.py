"""Tiny models of many architectures with random weights, test sequences, and log-probs of plain transformers.

Sliding windows are shorter than the sequences. All features that could break the sharing of prefixes are enabled.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from training.model.attention.shared_prefix import TokenSequence

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
# Parts of the configs: latent keys and values, experts by groups, experts, and scales of activations.
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
WINDOWED = {"layer_types": MIXED, "sliding_window": WINDOW}
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
DEEPER = {"num_hidden_layers": 4, "layer_types": MIXED * 2}
BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}
GEMMA4 = WINDOWED | BY_LAYER | {"global_head_dim": 16}
GEMMA3N = (
    WINDOWED
    | BY_LAYER
    | {"intermediate_size": [48] * 2, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 2}
)
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
    ("olmo3", "window", WINDOWED),
    ("phi", "bias in the head", {}),
    ("phi3", "full", {"sliding_window": None}),
    ("phi3", "window", {"sliding_window": WINDOW}),
    ("cohere", "logit scale", {"logit_scale": 0.0625}),
    ("cohere2", "window", WINDOWED | {"logit_scale": 0.25}),
    ("granite", "logit scale", SCALED),
    ("gemma", "tied", {}),
    ("gemma3_text", "window", WINDOWED | {"query_pre_attn_scalar": 8}),
    ("gemma3_text", "softcap", WINDOWED | {"final_logit_softcapping": 2.0}),
    ("glm4", "full", {}),
    ("smollm3", "layers without positions", {"no_rope_layers": [1, 0]}),
    ("smollm3", "window", WINDOWED | {"use_sliding_window": True}),
    ("starcoder2", "window", {"sliding_window": WINDOW}),
    ("apertus", "full", {}),
    ("arcee", "full", {}),
    ("cwm", "window", WINDOWED),
    ("deepseek_v2", "latent attention", LATENT | ROUTED),
    ("deepseek_v3", "latent attention", LATENT | ROUTED | {"routed_scaling_factor": 1.7}),
    ("dots1", "window", ROUTED | WINDOWED),
    ("ernie4_5", "bias", {"use_bias": True}),
    ("ernie4_5_moe", "experts", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1}),
    ("exaone4", "window", WINDOWED),
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
    ("ministral", "window", WINDOWED),
    ("ministral3", "queries scaled by position", {"sliding_window": WINDOW, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5}}),
    ("nanochat", "softcap", {"final_logit_softcapping": 2.0}),
    ("olmoe", "experts", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    ("opt", "learned positions", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    ("phimoe", "bias in the head", {"sliding_window": None, "lm_head_bias": True} | LOCAL),
    ("seed_oss", "bias", {"attention_bias": True, "attention_out_bias": True}),
    ("afmoe", "window", EXPERTS | WINDOWED | {"num_shared_experts": 1, "num_dense_layers": 1}),
    ("cohere2_moe", "window", EXPERTS | WINDOWED | {"logit_scale": 0.25, "first_k_dense_replace": 1}),
    ("exaone_moe", "window", EXPERTS | WINDOWED | SPARSE | {"num_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    ("gemma3n_text", "window", GEMMA3N),
    ("gemma3n_text", "shared keys", GEMMA3N | DEEPER | {
        "num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "final_logit_softcapping": 2.0}),
    ("gemma4_text", "window", GEMMA4 | {"final_logit_softcapping": 2.0}),
    ("gemma4_text", "shared keys", GEMMA4 | DEEPER | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    ("gemma4_text", "experts", GEMMA4 | {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("gemma4_unified_text", "window", GEMMA4),
    ("hy_v3", "experts", EXPERTS | SPARSE | {"num_shared_experts": 1, "first_k_dense_replace": 1}),
    ("iquestcoder", "full", {}),
    ("jais2", "full", {}),
    ("laguna", "window", EXPERTS | WINDOWED | SPARSE | {
        "num_attention_heads_per_layer": [4, 4], "shared_expert_intermediate_size": 16}),
    ("mellum", "window", EXPERTS | WINDOWED),
    ("solar_open", "experts", ROUTED),
    ("youtu", "latent attention", LATENT),
    ("gpt2", "learned positions", GPT2),
    ("gpt2", "scaled by layer", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", "parallel", {"hidden_dropout": 0.0}),
]  # fmt: skip

# Models for images or sound as well, with changes of the config of their language model.
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
HALF_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MULTIMODAL: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_vl", "full", {"model_type": "llama"}),
    ("exaone4_5", "window", {"model_type": "exaone4"} | WINDOWED),
    ("gemma3", "window", WINDOWED | {"query_pre_attn_scalar": 8}),
    ("gemma4", "softcap", GEMMA4 | {"final_logit_softcapping": 2.0}),
    ("glm4v", "full", SECTIONS),
    (
        "glm4v_moe",
        "experts",
        ROUTED | {"rope_parameters": SECTIONS["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    ),
    ("internvl", "full", {"model_type": "qwen3"}),
    ("kimi_k25", "latent attention", LATENT | ROUTED | {"model_type": "deepseek_v3"}),
    ("lfm2_vl", "convolutions", {"layer_types": ["conv", "full_attention"]}),
    ("llama4", "chunks", LOCAL | {"attention_chunk_size": 8, "intermediate_size_mlp": 48}),
    ("llava", "full", {"model_type": "llama"}),
    ("mistral3", "window", {"model_type": "ministral3", "sliding_window": WINDOW}),
    ("qwen2_5_vl", "window", SECTIONS | HALF_WINDOWED),
    ("qwen2_vl", "window", SECTIONS | HALF_WINDOWED),
    ("qwen3_5", "linear attention", LINEAR),
    ("qwen3_5_moe", "experts", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}),
    ("qwen3_vl", "full", SECTIONS),
    ("qwen3_vl_moe", "experts", SECTIONS | EXPERTS | {"sliding_window": WINDOW}),
    ("voxtral", "sound", {"model_type": "llama"}),
]
# Small sizes of the other parts. A config uses only the fields it knows.
OTHERS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "head_dim": 8, "depth": 1, "num_heads": 2, "embed_dim": 16, "out_hidden_size": 32,
    "projection_dim": 16, "deepstack_visual_indexes": [0], "vision_output_dim": 32, "projector_input_dim": 16,
    "projector_output_dim": 16,
}  # fmt: skip


def build(kind: str, changes: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(COMMON | changes))
    return away_from_one(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def build_multimodal(kind: str, changes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    usual = AutoConfig.for_model(kind)
    others = {name: getattr(usual, name) for name in usual.sub_configs if name in ("vision_config", "audio_config")}
    small = {name: OTHERS | ({"model_type": part.model_type} if part else {}) for name, part in others.items()}
    config = AutoConfig.for_model(kind, text_config=COMMON | changes, **small)
    return away_from_one(AutoModelForMultimodalLM.from_config(config, dtype=torch.float32))


def away_from_one(model: PreTrainedModel) -> PreTrainedModel:
    """Move norms and biases away from one and zero: these values could hide an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    return model.eval()


def groups() -> list[list[TokenSequence]]:
    """Return a pair, three responses, one, equal and nested ones, and odd masks; some prefixes reach into responses."""
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
    ids_T, mask_T = sequence.ids_T.to(model.device), sequence.mask_T.to(model.device)
    logprobs_TV = model(input_ids=ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    return logprobs_TV.gather(1, ids_T[1:, None])[:, 0][mask_T[1:]]


def gradients(model: PreTrainedModel, tokens_N: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(tokens_N), dtype=tokens_N.dtype, device=tokens_N.device) + 0.3
    (tokens_N * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
