"""Attention over a row of sequences that share prefixes, as one function registered with transformers.

A model whose `_attn_implementation` is `SHARED_PREFIX` calls `attend` in each layer and passes on the keywords it was called
with: so the plan of the row arrives as `plan=`. transformers builds no mask for an implementation that registered none.

Queries are never duplicated: each is in the row once. Keys and values of a prefix are gathered for each response, which
then attends causally, its last query to the last key (bottom-right).

    CPU, or float32 on a GPU    one call of torch's scaled_dot_product_attention a segment
    GPU in half precision       one call of torch's varlen_attn, which is FlashAttention (Dao 2023), for the whole row, if
                                the GPU and a head's size suit it

`VERIFIED` are the architectures that the tests compare with plain transformers; `why_not_shared` refuses every other one.

Legend: T tokens, Q and K query and key heads, D head size; as the first dimension K gathered keys, C copies of a key.
"""

import contextlib
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from training.contract.errors import ModelError
from training.model.body import body_of
from training.model.prefix import Copies, Plan

SHARED_PREFIX = "pedigree_shared_prefix"
VERIFIED = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "internlm3",
        "llama",
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
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
_SILENT = {"phimoe", "qwen2_moe"}  # their layers have windows that only transformers' own masks know of
_LAYERS = {"full_attention", "sliding_attention"}
_FORBIDDEN = ("softcap", "s_aux", "position_bias")
_HALF = (torch.float16, torch.bfloat16)
# What FlashAttention demands (flash_api.cpp of torch): Ampere or later, and heads of these sizes. Backward, those over 192 and
# up to 224 want more shared memory than GPUs for desktops have (sdp_utils.cpp), so they are left out.
_CAPABILITY = (8, 0)
_HEADS = frozenset({*range(8, 193, 8), *range(232, 257, 8)})
# Fewer heads of keys than of queries; torch 2.11 takes them without being told, and has no such option.
_IN_GROUPS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def why_not_shared(model: PreTrainedModel, training: bool) -> str | None:
    """Why sequences must not share a row in `model`; None if they may."""
    body = body_of(model)
    config = body.config
    if config.model_type not in VERIFIED:
        return f"models of type {config.model_type} are not among those verified to be exact with shared prefixes"
    if training and (dropout := _attention_dropout(config)):
        return f"attention dropout of {dropout} would not be drawn for each sequence"
    if not getattr(body, "_supports_attention_backend", False):
        return f"{type(body).__name__} does not let its attention be replaced"
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        return f"layers of type {', '.join(sorted(unknown))} are not known"
    if _has_silent_window(config):
        return "attention is not told of the sliding window that its layers have"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "attention scores are capped (attn_logit_softcapping)"
    if found := _rope_types(config) & {"dynamic", "longrope"}:
        return f"rotary positions of type {found.pop()} depend on the longest sequence of a row"
    return None


@contextlib.contextmanager
def use_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Within the block, the layers of the body of `model` use the attention that transformers knows by this name."""
    config = body_of(model).config
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: torch.nn.Module,
    query_1QTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    plan: Plan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, 1 x T x Q x D. Raises ModelError where the layer asks for what is not done here."""
    asked = [name for name in _FORBIDDEN if others.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention mask")
    if dropout > 0:
        asked.append("dropout")
    if asked:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(asked)}, which shared prefixes do not have")
    attention = in_one_call if _suits_kernel(query_1QTD, value_1KTD) else by_segment
    return attention(query_1QTD, key_1KTD, value_1KTD, plan, scaling, sliding_window), None


def _suits_kernel(query_1QTD: Tensor, value_1KTD: Tensor) -> bool:
    """Whether varlen_attn takes queries and values of this device, dtype and head size, which has to be the same for both."""
    size = query_1QTD.shape[-1]
    if not query_1QTD.is_cuda or query_1QTD.dtype not in _HALF or size != value_1KTD.shape[-1] or size not in _HEADS:
        return False
    return bool(torch.cuda.get_device_capability(query_1QTD.device) >= _CAPABILITY)


def by_segment(
    query_1QTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, plan: Plan, scale: float | None, window: int | None
) -> Tensor:
    """One call a segment. The row is split, not sliced: the gradient of a slice would be as long as the whole row.

    On a GPU each head of queries gets keys of its own: for float32, and for masks, torch 2.13 has no kernel that knows of
    groups (sdp_utils.cpp), and would keep all scores, Q x T x T numbers, for the backward pass.
    """
    if query_1QTD.is_cuda and (groups := query_1QTD.shape[1] // key_1KTD.shape[1]) > 1:
        key_1KTD, value_1KTD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_1KTD, value_1KTD))
    queries, keys, values = (tensor.split(plan.lengths, dim=2) for tensor in (query_1QTD, key_1KTD, value_1KTD))
    outputs = []
    for number, segment in enumerate(plan.segments):
        seen = [number] if segment.prefix is None else [segment.prefix, number]
        mask = plan.mask(number, window)
        output = scaled_dot_product_attention(
            queries[number],
            torch.cat([keys[n] for n in seen], dim=2),
            torch.cat([values[n] for n in seen], dim=2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query_1QTD.shape[1] != key_1KTD.shape[1],
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def in_one_call(
    query_1QTD: Tensor, key_1KTD: Tensor, value_1KTD: Tensor, plan: Plan, scale: float | None, window: int | None
) -> Tensor:
    """One call for the row, whose queries stay where they are."""
    gathered = plan.gathered
    queries, keys, values = (tensor[0].transpose(0, 1).contiguous() for tensor in (query_1QTD, key_1KTD, value_1KTD))
    if gathered.copies is not None:
        keys, values = (_Gathering.apply(tensor, gathered.copies) for tensor in (keys, values))
    output_TQD = varlen_attn(
        queries,
        keys,
        values,
        gathered.query_bounds,
        gathered.key_bounds,
        gathered.longest_query,
        gathered.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **(_IN_GROUPS if query_1QTD.shape[1] != key_1KTD.shape[1] else {}),
    )
    return output_TQD[None]


class _Gathering(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Rows, some of them several times. The gradient of a row is the sum of those of its copies, gathered again.

    If it has to be deterministic, torch's own gradient of `index_select` sorts: twenty kernels, where these are three.
    """

    @staticmethod
    def forward(ctx: Any, tensor_TKD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return tensor_TKD.index_select(0, copies.rows_K)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream_KKD: Tensor) -> tuple[Tensor, None]:
        places_TC, nothing = ctx.copies.places_TC, upstream_KKD.new_zeros(1, *upstream_KKD.shape[1:])
        of_copies = torch.cat([upstream_KKD, nothing]).index_select(0, places_TC.flatten())
        return of_copies.unflatten(0, places_TC.shape).sum(dim=1), None


def _attention_dropout(config: Any) -> float:
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


def _has_silent_window(config: Any) -> bool:
    """Whether a layer's mask would have a window that the layer does not name when it calls for attention."""
    silent, kinds = config.model_type in _SILENT, getattr(config, "layer_types", None)
    if kinds is None:
        return silent and getattr(config, "sliding_window", None) is not None
    return "sliding_attention" in kinds and (silent or not getattr(config, "use_sliding_window", True))


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions, of the model or of each kind of its layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part["rope_type"] for part in parts if isinstance(part.get("rope_type"), str)}


# A plan is plain Python, over whose segments a compiler would unroll: compiled layers call `attend` as it is.
AttentionInterface.register(SHARED_PREFIX, torch.compiler.disable(attend))
