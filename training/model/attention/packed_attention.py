"""Attention over a row of sequences that share prefixes, as one function registered with transformers.

A model whose `_attn_implementation` is `SHARED_PREFIX` calls `attend` in each layer and passes on the keywords it was called
with: so the plan of the row arrives as `plan=`. transformers builds no mask for an implementation that registered none.

Queries are never duplicated: each is in the row once. Keys and values of a prefix are gathered for each response, which
then attends causally, its last query to the last key (bottom-right).

    CPU, or float32 on a GPU    one call of torch's scaled_dot_product_attention a segment
    GPU in half precision       one call of torch's varlen_attn, which is FlashAttention (Dao 2023), for the whole row, if
                                the GPU and a head's size suit it

Which models may run so, and why others may not, is told in prefix_support.py.

Legend: T tokens, Q and K query and key heads, D head size; as the first dimension K gathered keys; G, R and C as in `KVCopies`.
"""

import contextlib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations import sdpa_attention

from training.contract.errors import ModelError
from training.model.attention.shared_prefix import KVCopies, PackedAttentionPlan
from training.model.backbone import body_of

SHARED_PREFIX = "pedigree_shared_prefix"
_FORBIDDEN = ("softcap", "s_aux", "position_bias")
_HALF = (torch.float16, torch.bfloat16)
# What FlashAttention demands (flash_api.cpp of torch): Ampere or later, and heads of these sizes. Backward, those over 192 and
# up to 224 want more shared memory than GPUs for desktops have (sdp_utils.cpp), so they are left out.
_CAPABILITY = (8, 0)
_HEADS = frozenset({*range(8, 193, 8), *range(232, 257, 8)})
# Fewer heads of keys than of queries; torch 2.11 takes them without being told, and has no such option.
_IN_GROUPS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


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
    plan: PackedAttentionPlan,
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
    query_1QTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    plan: PackedAttentionPlan,
    scale: float | None,
    window: int | None,
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
    query_1QTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    plan: PackedAttentionPlan,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """One call for the row, whose queries stay where they are."""
    gathered = plan.gathered
    # Not `tensor[0]`, whose gradient would first be filled with zeros.
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
    """Keys and values, some of them several times. The gradient of each is the sum of those of its copies, gathered again.

    Both at once, since here it is the number of kernels that costs. If it has to be deterministic, torch's own gradient of
    `index_select` sorts: twenty kernels, where these are four.
    """

    @staticmethod
    def forward(ctx: Any, keys_TKD: Tensor, values_TKD: Tensor, copies: KVCopies) -> tuple[Tensor, ...]:
        ctx.copies = copies
        both: tuple[Tensor, ...] = torch.cat([keys_TKD, values_TKD]).index_select(0, copies.rows_G).chunk(2)
        return both

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_keys_KKD: Tensor, of_values_KKD: Tensor) -> tuple[Tensor | None, ...]:
        places_RC, nothing = ctx.copies.places_RC, of_keys_KKD.new_zeros(1, *of_keys_KKD.shape[1:])
        of_copies = torch.cat([of_keys_KKD, of_values_KKD, nothing]).index_select(0, places_RC.flatten())
        of_keys_TKD, of_values_TKD = of_copies.unflatten(0, places_RC.shape).sum(dim=1).chunk(2)
        return of_keys_TKD, of_values_TKD, None


def _without_groups_in_float32(plain: Callable[[Tensor | None, Tensor, Tensor], bool]) -> Callable[..., bool]:
    """Whether heads of queries share keys in rows of their own, as transformers asks: in float32 on a GPU never, as above."""

    def kernel_knows_groups(mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
        return (not key.is_cuda or key.dtype in _HALF) and plain(mask, key, value)

    return kernel_knows_groups


sdpa_attention.use_gqa_in_sdpa = _without_groups_in_float32(sdpa_attention.use_gqa_in_sdpa)
# A plan is plain Python, over whose segments a compiler would unroll: compiled layers call `attend` as it is.
AttentionInterface.register(SHARED_PREFIX, torch.compiler.disable(attend))
