"""Attention over a row in one call, compared with plain attention, one sequence at a time.

The kernel runs only on GPUs. Here a float64 reference replaces it at torch's operator, so that the calling code runs
unchanged. The reference follows the documentation of torch and FlashAttention. Between two neighbouring bounds there are L
queries and K keys; query i attends to key j if `i + K - L - left <= j <= i + K - L + right`, and a negative `left` is unbounded
(https://github.com/Dao-AILab/flash-attention, "bottom right"). Each key head serves equally many consecutive query heads. The
reference asserts the requirements of the kernel's source (flash_api.cpp, mha_varlen_fwd and _bwd).

Legend: T tokens, Q and K query and key heads, D head size, R rows gathered.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from training.contract.errors import ModelError
from training.model.attention import packed_attention
from training.model.attention.shared_prefix import PackedAttentionPlan, TokenSequence, build_row

CPU = torch.device("cpu")
HEAD = 8


def attention_weights(queries: Tensor, keys: Tensor, scale: float, left: int, right: int) -> Tensor:
    """Return the weight of each key for each query, Q x L x K: a softmax over the keys in the window, by definition."""
    query_positions = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    positions = torch.arange(len(keys))[None]
    in_window = (positions <= query_positions + right) & ((positions >= query_positions - left) if left >= 0 else True)
    scores = scale * torch.einsum("lhd,khd->hlk", queries, repeat_heads(keys, queries))
    return scores.masked_fill(~in_window, -math.inf).softmax(-1)


def repeat_heads(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: int, right: int) -> Tensor:
    """Return L x Q x D from K keys and values of fewer heads."""
    weights = attention_weights(queries, keys, scale, left, right)
    return torch.einsum("hlk,khd->lhd", weights, repeat_heads(values, queries))


def plain_attention_backward(
    upstream: Tensor, queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: int, right: int
) -> list[Tensor]:
    """Return the gradients of `plain_attention`, derived by hand: autograd does not work below torch's operators."""
    weights = attention_weights(queries, keys, scale, left, right)
    weight_grads = torch.einsum("lhd,khd->hlk", upstream, repeat_heads(values, queries))
    score_grads = scale * weights * (weight_grads - (weights * weight_grads).sum(-1, keepdim=True))
    query_grads = torch.einsum("hlk,khd->lhd", score_grads, repeat_heads(keys, queries))
    key_grads, value_grads = (
        torch.einsum("hlk,lhd->khd", score_grads, queries),
        torch.einsum("hlk,lhd->khd", weights, upstream),
    )
    return [query_grads, *(grad.unflatten(1, (keys.shape[1], -1)).sum(2) for grad in (key_grads, value_grads))]


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window_size is not None and (is_causal == (window_size == [-1, 0])) and not any(args)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert_requirements(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    parts = zip(cut(query, cu_seq_q), cut(key, cu_seq_k), cut(value, cu_seq_k), strict=True)
    scale = HEAD**-0.5 if scale is None else scale
    output = torch.cat([plain_attention(q, k, v, scale, *window_size) for q, k, v in parts])
    return output, query.new_empty(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def kernel_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, ...]:
    assert grad_out.stride(-1) == out.stride(-1) == 1 and grad_out.dtype == query.dtype and window_size is not None
    assert_requirements(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    parts = zip(cut(grad_out, cu_seq_q), cut(query, cu_seq_q), cut(key, cu_seq_k), cut(value, cu_seq_k), strict=True)
    scale = HEAD**-0.5 if scale is None else scale
    left, right = window_size
    found = [plain_attention_backward(upstream, q, k, v, scale, left, right) for upstream, q, k, v in parts]
    return tuple(torch.cat(gradients) for gradients in zip(*found, strict=True))


def assert_requirements(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int
) -> None:
    for tensor in (query, key, value):
        assert tensor.stride(-1) == 1 and tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 256
    for bounds, tensor, longest in ((bounds_q, query, max_q), (bounds_k, key, max_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.device == query.device
        assert bounds[0] == 0 and bounds[-1] == len(tensor) and bounds.diff().max() == longest
    assert len(bounds_q) == len(bounds_k) > 1


def cut(tensor: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
    return tensor.split(bounds.diff().tolist())


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Register the reference for the CPU. torch lacks a CPU kernel, so nothing is replaced."""
    varlen._varlen_attn.register_kernel("cpu")(kernel)
    varlen._varlen_attn_backward.register_kernel("cpu")(kernel_backward)


def group(prompt: int, *responses: int) -> list[TokenSequence]:
    """Return responses of these lengths to one prompt; their first tokens differ."""
    start = torch.arange(100, 100 + prompt)
    runs = [torch.cat([start, torch.full((length,), number)]) for number, length in enumerate(responses)]
    return [TokenSequence(ids, torch.arange(len(ids)) >= prompt) for ids in runs]


GROUPS = {
    "pairs": [group(9, 4, 7), group(3, 2, 2)],
    "unlike lengths": [group(2, 60, 3), group(30, 2, 41, 5, 17)],
    "nothing shared": [group(0, 6, 4), group(5, 3, 8)],
    "alone": [group(11, 9)],
    "one of each": [group(1, 2, 3), group(0, 2), group(40, 2, 3, 2)],
}


def sequence_at_a_time(
    query: Tensor, key: Tensor, value: Tensor, plan: PackedAttentionPlan, scale: float, window: int | None
) -> Tensor:
    """Return each segment's attention, computed from its full sequence with the prefix."""
    rows = torch.arange(query.shape[2]).split(plan.lengths)
    outputs = []
    for number, segment in enumerate(plan.segments):
        indices = rows[number] if segment.prefix is None else torch.cat([rows[segment.prefix], rows[number]])
        q, k, v = (tensor[0, :, indices].transpose(0, 1) for tensor in (query, key, value))
        left = -1 if window is None else window - 1  # in transformers a window includes the query's position
        outputs.append(plain_attention(q, k, v, scale, left, 0)[-segment.length :])
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 33, 500])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["heads alike", "in groups", "one for all"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_in_one_call_equals_plain_attention_of_each_sequence(
    groups, heads: tuple[int, int], window: int | None, scale: float | None
):
    """Values, and gradients for random upstream gradients."""
    row = build_row(groups, CPU)
    tokens, random = len(row.ids_T), torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, HEAD) for count in (heads[0], heads[1], heads[1])]
    q, k, v = inputs = [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]
    found = packed_attention.in_one_call(q, k, v, row.plan, scale, window)
    expected = sequence_at_a_time(q, k, v, row.plan, scale or HEAD**-0.5, window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    upstream = torch.randn(found.shape, generator=random, dtype=torch.float64)
    found_grads, expected_grads = (torch.autograd.grad(output, inputs, upstream) for output in (found, expected))
    torch.testing.assert_close(found_grads, expected_grads, atol=1e-12, rtol=0)


def test_in_one_call_and_by_segment_agree_on_transposed_views():
    """Layers pass transposed views of T x Q x D."""
    row = build_row(GROUPS["unlike lengths"], CPU)
    tokens, random = len(row.ids_T), torch.Generator().manual_seed(0)
    shapes = [(1, tokens, heads, HEAD) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64).transpose(1, 2) for s in shapes)
    for window in (None, 5):
        found, expected = (
            attention(q, k, v, row.plan, None, window)
            for attention in (packed_attention.in_one_call, packed_attention.by_segment)
        )
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


class OnGpu(TorchFunctionMode):
    """Within the block tensors report `is_cuda`, and attention asserts the requirements of float32 kernels on GPUs.

    These need as many key heads as query heads (torch 2.13: sdp_utils.cpp, check_batch_size_and_num_heads_dense). For other
    calls torch falls back to a kernel that keeps all scores.
    """

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.is_cuda.__get__:
            return True
        if function is scaled_dot_product_attention:
            self.calls += 1
            assert args[0].shape[1] == args[1].shape[1] == args[2].shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["heads alike", "in groups", "one for all"])
def test_by_segment_meets_the_requirements_of_gpu_kernels(heads: tuple[int, int], window: int | None):
    row = build_row(GROUPS["unlike lengths"], CPU)
    tokens, random = len(row.ids_T), torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, HEAD) for count in (heads[0], heads[1], heads[1])]
    q, k, v = inputs = [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]
    with OnGpu() as watch:
        found = packed_attention.by_segment(q, k, v, row.plan, None, window)
    assert watch.calls == len(row.plan.segments)
    expected = sequence_at_a_time(q, k, v, row.plan, HEAD**-0.5, window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    upstream = torch.randn(found.shape, generator=random, dtype=torch.float64)
    found_grads, expected_grads = (torch.autograd.grad(output, inputs, upstream) for output in (found, expected))
    torch.testing.assert_close(found_grads, expected_grads, atol=1e-12, rtol=0)


def test_transformers_attention_meets_the_requirements_of_gpu_kernels():
    """Models that cannot share prefixes use it."""
    module, random = torch.nn.Module(), torch.Generator().manual_seed(0)
    module.num_key_value_groups = 3
    q, k, v = inputs = [torch.randn(1, n, 5, HEAD, generator=random).requires_grad_() for n in (6, 2, 2)]
    usual = AttentionInterface()["sdpa"]
    with OnGpu() as watch:
        found, _ = usual(module, q, k, v, None)
    assert watch.calls == 1
    expected, _ = usual(module, q, k, v, None)
    found_grads, expected_grads = (torch.autograd.grad(output.sum(), inputs) for output in (found, expected))
    torch.testing.assert_close([found, *found_grads], [expected, *expected_grads])


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"softcap": 5.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1)}, "attention mask"),
        ({"dropout": 0.1}, "dropout"),
    ],
    ids=["softcap", "sinks", "bias", "mask", "dropout"],
)
def test_attend_with_an_unsupported_feature_raises(options: dict[str, Any], feature: str):
    row = build_row(GROUPS["alone"], CPU)
    tensor = torch.zeros(1, 2, len(row.ids_T), HEAD)
    options = {"attention_mask": None, "plan": row.plan} | options
    with pytest.raises(ModelError, match=rf"Module needs {feature}; .* \[unsupported-attention\]"):
        packed_attention.attend(torch.nn.Module(), tensor, tensor, tensor, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize("window", [None, 4, 33])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_attention_on_a_gpu_equals_plain_attention(
    groups, heads: tuple[int, int], window: int | None, dtype: torch.dtype, allowed: float
):
    """torch's kernel, if it supports the dtype, and `by_segment`, compared with float64 on the same operands."""
    cpu_plan, gpu_plan = (build_row(groups, device).plan for device in (CPU, torch.device("cuda")))
    tokens, random = sum(cpu_plan.lengths), torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, n, tokens, HEAD, generator=random).to(dtype) for n in (heads[0], heads[1], heads[1])]
    q, k, v = exact = [tensor.double().requires_grad_() for tensor in inputs]
    output = sequence_at_a_time(q, k, v, cpu_plan, HEAD**-0.5, window)
    upstream = torch.randn(output.shape, generator=random).to(dtype)
    expected = [output, *torch.autograd.grad(output, exact, upstream.double())]
    supported = dtype == torch.bfloat16
    attentions = [packed_attention.by_segment] + [packed_attention.in_one_call] * supported
    for attention in attentions:
        q, k, v = gpu_inputs = [tensor.cuda().requires_grad_() for tensor in inputs]
        assert packed_attention._suits_kernel(q, v) == supported
        output = attention(q, k, v, gpu_plan, None, window)
        found = [output, *torch.autograd.grad(output, gpu_inputs, upstream.cuda())]
        for one, other in zip(found, expected, strict=True):
            assert (one.cpu().double() - other).norm() < allowed * other.norm(), attention.__name__
