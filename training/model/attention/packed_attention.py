"""Attention over a row of sequences that share prefixes: one function registered with transformers.

If a model's `_attn_implementation` is `SHARED_PREFIX`, each layer calls `attend` with the keywords of the model's call: the
row's plan arrives as `plan=`. transformers builds no mask for an implementation without a registered mask function.

Queries are in the row once. Keys and values of a prefix are gathered for each response. The response then attends causally,
its last query to the last key (bottom-right).

    CPU, or float32 on a GPU    one call of torch's scaled_dot_product_attention per segment
    GPU in half precision       one call of torch's varlen_attn, FlashAttention (Dao 2023), for the row, if it supports the
                                GPU and the head size

prefix_support.py lists the models that may run this way, and the reasons against others.

Legend: T tokens, Q and K query and key heads, D head size; as the first dimension K gathered keys; G, R and C as in `KVCopies`.
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
from training.model.attention.shared_prefix import KVCopies, PackedAttentionPlan
from training.model.backbone import body_of
from training.model.transformers_patches import repeat_keys_in_float32

SHARED_PREFIX = "pedigree_shared_prefix"
_FORBIDDEN = ("softcap", "s_aux", "position_bias")
_HALF = (torch.float16, torch.bfloat16)
# FlashAttention requires Ampere or later and these head sizes (flash_api.cpp of torch). The backward pass of sizes over 192
# and up to 224 needs more shared memory than desktop GPUs have (sdp_utils.cpp), so they are left out.
_CAPABILITY = (8, 0)
_HEADS = frozenset({*range(8, 193, 8), *range(232, 257, 8)})
# Options for fewer key heads than query heads. torch 2.11 lacks the option and accepts them without it.
_IN_GROUPS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@contextlib.contextmanager
def use_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the body of `model` use this attention implementation of transformers within the block."""
    config = body_of(model).config
    previous = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = previous


def attend(
    module: torch.nn.Module,
    query_1QTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    plan: PackedAttentionPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer, 1 x T x Q x D. Raise ModelError if the layer needs an unsupported feature."""
    unsupported = [name for name in _FORBIDDEN if kwargs.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention mask")
    if dropout > 0:
        unsupported.append("dropout")
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} needs {', '.join(unsupported)}; attention over shared prefixes does not support this: "
            "use another base model",
            "unsupported-attention",
        )
    attention = in_one_call if _suits_kernel(query_1QTD, value_1KTD) else by_segment
    return attention(query_1QTD, key_1KTD, value_1KTD, plan, scaling, sliding_window), None


def _suits_kernel(query_1QTD: Tensor, value_1KTD: Tensor) -> bool:
    """Return whether varlen_attn supports this device, dtype and head size. Queries and values must have the same size."""
    size = query_1QTD.shape[-1]
    if not query_1QTD.is_cuda or query_1QTD.dtype not in _HALF or size != value_1KTD.shape[-1] or size not in _HEADS:
        return False
    return bool(torch.cuda.get_device_capability(query_1QTD.device) >= _CAPABILITY)


def by_segment(
    query_1QTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    plan: PackedAttentionPlan,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend with one call per segment. We split the row: the gradient of a slice would be as long as the row.

    On a GPU the keys are repeated for each query head. torch 2.13 lacks a kernel with grouped heads for float32 and for masks
    (sdp_utils.cpp). Without the repetition it would keep all Q x T x T scores for the backward pass.
    """
    if query_1QTD.is_cuda and (groups := query_1QTD.shape[1] // key_1KTD.shape[1]) > 1:
        key_1KTD, value_1KTD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_1KTD, value_1KTD))
    queries, keys, values = (tensor.split(plan.lengths, dim=2) for tensor in (query_1QTD, key_1KTD, value_1KTD))
    outputs = []
    for number, segment in enumerate(plan.segments):
        attended = [number] if segment.prefix is None else [segment.prefix, number]
        mask = plan.mask(number, window)
        output = scaled_dot_product_attention(
            queries[number],
            torch.cat([keys[n] for n in attended], dim=2),
            torch.cat([values[n] for n in attended], dim=2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query_1QTD.shape[1] != key_1KTD.shape[1],
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def in_one_call(
    query_1QTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    plan: PackedAttentionPlan,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend with one call for the row."""
    gathered = plan.gathered
    # `squeeze` instead of `tensor[0]`: the gradient of the latter is first filled with zeros.
    queries, keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1QTD, key_1KTD, value_1KTD))
    if gathered.copies is None:
        keys, values = keys.contiguous(), values.contiguous()
    else:
        keys, values = _Gathering.apply(keys, values, gathered.copies)
    output_TQD = varlen_attn(
        queries.contiguous(),
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
    """Gather copies of keys and values. The gradient of a key is the sum of the gradients of its copies.

    Keys and values go together, because the number of kernels dominates the cost. In deterministic mode torch's gradient of
    `index_select` sorts and takes twenty kernels; this takes four.
    """

    @staticmethod
    def forward(ctx: Any, keys_TKD: Tensor, values_TKD: Tensor, copies: KVCopies) -> tuple[Tensor, ...]:
        ctx.copies = copies
        gathered: tuple[Tensor, ...] = torch.cat([keys_TKD, values_TKD]).index_select(0, copies.rows_G).chunk(2)
        return gathered

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, key_grads_KKD: Tensor, value_grads_KKD: Tensor) -> tuple[Tensor | None, ...]:
        places_RC, zeros = ctx.copies.places_RC, key_grads_KKD.new_zeros(1, *key_grads_KKD.shape[1:])
        copy_grads = torch.cat([key_grads_KKD, value_grads_KKD, zeros]).index_select(0, places_RC.flatten())
        key_grads_TKD, value_grads_TKD = copy_grads.unflatten(0, places_RC.shape).sum(dim=1).chunk(2)
        return key_grads_TKD, value_grads_TKD, None


repeat_keys_in_float32()
# A compiler would unroll the segments of a plan, plain Python objects: compiled layers call the uncompiled `attend`.
AttentionInterface.register(SHARED_PREFIX, torch.compiler.disable(attend))
