"""The models that may run several sequences with shared prefixes in one row (packed_attention.py), and reasons against.

The tests compare the architectures in `VERIFIED` with plain transformers. Other architectures run without sharing. The names
are types of language models, also of those inside multimodal models.
"""

from typing import Any

from transformers import PreTrainedModel

from training.model.backbone import architecture, body_of

VERIFIED = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe_text",
        "glm4v_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "internlm3",
        "iquestcoder",
        "jais2",
        "laguna",
        "llama",
        "mellum",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "youtu",
    }
)
_SILENT = {"phimoe", "qwen2_moe"}  # only transformers' masks contain the sliding windows of their layers
_LAYERS = {"full_attention", "sliding_attention"}
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


def why_not_shared(model: PreTrainedModel, training: bool) -> str | None:
    """Return why sequences must not share a row in `model`; None if they may."""
    body = body_of(model)
    config = body.config
    if config.model_type not in VERIFIED:
        return f"models of type {config.model_type} are not verified to be exact with shared prefixes"
    if training and (dropout := _attention_dropout(config)):
        return f"attention dropout of {dropout} would not be drawn for each sequence"
    if not getattr(body, "_supports_attention_backend", False):
        return f"{architecture(body)} does not support another attention implementation"
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        return f"layers of type {', '.join(sorted(unknown))} are not known"
    if _has_silent_window(config):
        return "its layers do not pass their sliding window to the attention function"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "attention scores are capped (attn_logit_softcapping)"
    if rope_types := rope_by_length(model):
        return f"rotary positions of type {rope_types.pop()} depend on the longest sequence of a row"
    return None


def rope_by_length(model: PreTrainedModel) -> set[str]:
    """Return the model's types of rotary positions that depend on the row length."""
    return _rope_types(body_of(model).config) & _ROPE_BY_LENGTH


def _attention_dropout(config: Any) -> float:
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


def _has_silent_window(config: Any) -> bool:
    """Return whether a layer has a sliding window in its mask only, and does not pass it to the attention function."""
    silent, kinds = config.model_type in _SILENT, getattr(config, "layer_types", None)
    if kinds is None:
        return silent and getattr(config, "sliding_window", None) is not None
    return "sliding_attention" in kinds and (silent or not getattr(config, "use_sliding_window", True))


def _rope_types(config: Any) -> set[str]:
    """Return the types of rotary positions, of the model or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in parts if isinstance(part.get("rope_type"), str)}
