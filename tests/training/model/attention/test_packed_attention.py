"""Attention over a row in one call, against plain attention a sequence at a time.

The kernel itself runs on GPUs alone. Here its place is taken, at torch's own operator, by a float64 reference of what torch
and FlashAttention document of it, so that what calls it runs as it is: with queries number i of L and keys number j of K in
each stretch that two neighbouring bounds give, i sees j if `i + K - L - left <= j <= i + K - L + right`, where a negative
`left` is none (https://github.com/Dao-AILab/flash-attention, "bottom right"), and each head of keys serves equally many
consecutive heads of queries. It demands what the kernel's source does (flash_api.cpp, mha_varlen_fwd and _bwd).

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


def weigh(queries: Tensor, keys: Tensor, scale: float, left: int, right: int) -> Tensor:
    """How much each query makes of each key, Q x L x K: a softmax over what it sees, by the definition."""
    at = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    of = torch.arange(len(keys))[None]
    seen = (of <= at + right) & ((of >= at - left) if left >= 0 else True)
    scores = scale * torch.einsum("lhd,khd->hlk", queries, of_each_head(keys, queries))
    return scores.masked_fill(~seen, -math.inf).softmax(-1)


def of_each_head(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


def plainly(queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: int, right: int) -> Tensor:
    """L x Q x D from K keys and values of fewer heads."""
    weights = weigh(queries, keys, scale, left, right)
    return torch.einsum("hlk,khd->lhd", weights, of_each_head(values, queries))


def plainly_backward(
    upstream: Tensor, queries: Tensor, keys: Tensor, values: Tensor, scale: float, left: int, right: int
) -> list[Tensor]:
    """The gradients of `plainly`, by hand: below torch's operators there is no automatic differentiation."""
    weights = weigh(queries, keys, scale, left, right)
    of_weights = torch.einsum("lhd,khd->hlk", upstream, of_each_head(values, queries))
    of_scores = scale * weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    of_queries = torch.einsum("hlk,khd->lhd", of_scores, of_each_head(keys, queries))
    of_keys, of_values = (
        torch.einsum("hlk,lhd->khd", of_scores, queries),
        torch.einsum("hlk,lhd->khd", weights, upstream),
    )
    return [of_queries, *(of.unflatten(1, (keys.shape[1], -1)).sum(2) for of in (of_keys, of_values))]


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
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window_size is not None and (is_causal == (window_size == [-1, 0])) and not any(others)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    demand(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    stretches = zip(cut(query, cu_seq_q), cut(key, cu_seq_k), cut(value, cu_seq_k), strict=True)
    scale = HEAD**-0.5 if scale is None else scale
    output = torch.cat([plainly(q, k, v, scale, *window_size) for q, k, v in stretches])
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
    demand(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    parts = zip(cut(grad_out, cu_seq_q), cut(query, cu_seq_q), cut(key, cu_seq_k), cut(value, cu_seq_k), strict=True)
    scale = HEAD**-0.5 if scale is None else scale
    left, right = window_size
    found = [plainly_backward(of_one, q, k, v, scale, left, right) for of_one, q, k, v in parts]
    return tuple(torch.cat(gradients) for gradients in zip(*found, strict=True))


def demand(
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
    """On the processor torch has none, so nothing is replaced."""
    varlen._varlen_attn.register_kernel("cpu")(kernel)
    varlen._varlen_attn_backward.register_kernel("cpu")(kernel_backward)


def group(prompt: int, *responses: int) -> list[TokenSequence]:
    """Responses of these lengths to one prompt; the first token of each tells it from the others."""
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
    """Each segment of the row as the end of its own sequence, prefix and all, from whole sequences of queries."""
    rows = torch.arange(query.shape[2]).split(plan.lengths)
    outputs = []
    for number, segment in enumerate(plan.segments):
        whole = rows[number] if segment.prefix is None else torch.cat([rows[segment.prefix], rows[number]])
        q, k, v = (tensor[0, :, whole].transpose(0, 1) for tensor in (query, key, value))
        left = -1 if window is None else window - 1  # transformers: a window counts the query's own place
        outputs.append(plainly(q, k, v, scale, left, 0)[-segment.length :])
    return torch.cat(outputs)[None]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 33, 500])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["heads alike", "in groups", "one for all"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_one_call_is_plain_attention_of_each_sequence(
    groups, heads: tuple[int, int], window: int | None, scale: float | None
):
    """Values and gradients, where each place of the row counts differently."""
    row = build_row(groups, CPU)
    tokens, random = len(row.ids_T), torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, HEAD) for count in (heads[0], heads[1], heads[1])]
    q, k, v = given = [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]
    found = packed_attention.in_one_call(q, k, v, row.plan, scale, window)
    expected = sequence_at_a_time(q, k, v, row.plan, scale or HEAD**-0.5, window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    upstream = torch.randn(found.shape, generator=random, dtype=torch.float64)
    ours, plain = (torch.autograd.grad(output, given, upstream) for output in (found, expected))
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)


def test_both_ways_agree_on_views_as_layers_give_them():
    """Queries, keys and values are transposed views of T x Q x D."""
    row = build_row(GROUPS["unlike lengths"], CPU)
    tokens, random = len(row.ids_T), torch.Generator().manual_seed(0)
    shapes = [(1, tokens, heads, HEAD) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64).transpose(1, 2) for s in shapes)
    for window in (None, 5):
        found, expected = (
            way(q, k, v, row.plan, None, window) for way in (packed_attention.in_one_call, packed_attention.by_segment)
        )
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


class OnGpu(TorchFunctionMode):
    """Within the block tensors say that they are on a GPU, and attention has the demands of the kernels for float32 there.

    These want as many heads of keys as of queries (torch 2.13: sdp_utils.cpp, check_batch_size_and_num_heads_dense); for any
    other call torch falls back to one that keeps all scores.
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
def test_a_segment_at_a_time_suits_the_kernels_of_a_gpu(heads: tuple[int, int], window: int | None):
    row = build_row(GROUPS["unlike lengths"], CPU)
    tokens, random = len(row.ids_T), torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, HEAD) for count in (heads[0], heads[1], heads[1])]
    q, k, v = given = [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]
    with OnGpu() as watch:
        found = packed_attention.by_segment(q, k, v, row.plan, None, window)
    assert watch.calls == len(row.plan.segments)
    expected = sequence_at_a_time(q, k, v, row.plan, HEAD**-0.5, window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    upstream = torch.randn(found.shape, generator=random, dtype=torch.float64)
    ours, plain = (torch.autograd.grad(output, given, upstream) for output in (found, expected))
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)


def test_a_row_of_its_own_suits_the_kernels_of_a_gpu():
    """As transformers runs it, in any model that cannot share prefixes."""
    module, random = torch.nn.Module(), torch.Generator().manual_seed(0)
    module.num_key_value_groups = 3
    q, k, v = given = [torch.randn(1, n, 5, HEAD, generator=random).requires_grad_() for n in (6, 2, 2)]
    usual = AttentionInterface()["sdpa"]
    with OnGpu() as watch:
        found, _ = usual(module, q, k, v, None)
    assert watch.calls == 1
    expected, _ = usual(module, q, k, v, None)
    ours, plain = (torch.autograd.grad(output.sum(), given) for output in (found, expected))
    torch.testing.assert_close([found, *ours], [expected, *plain])


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"softcap": 5.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1)}, "attention mask"),
        ({"dropout": 0.1}, "dropout"),
    ],
    ids=["softcap", "sinks", "bias", "mask", "dropout"],
)
def test_what_would_be_left_out_is_refused(asked: dict[str, Any], named: str):
    row = build_row(GROUPS["alone"], CPU)
    tensor = torch.zeros(1, 2, len(row.ids_T), HEAD)
    given = {"attention_mask": None, "plan": row.plan} | asked
    with pytest.raises(ModelError, match=f"Module asks for {named}, which shared prefixes do not have"):
        packed_attention.attend(torch.nn.Module(), tensor, tensor, tensor, **given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize("window", [None, 4, 33])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_on_a_gpu_it_is_plain_attention(
    groups, heads: tuple[int, int], window: int | None, dtype: torch.dtype, allowed: float
):
    """torch's own kernel, where it takes the dtype, and the way a segment at a time, against float64 on the same operands."""
    here, there = (build_row(groups, device).plan for device in (CPU, torch.device("cuda")))
    tokens, random = sum(here.lengths), torch.Generator().manual_seed(0)
    given = [torch.randn(1, n, tokens, HEAD, generator=random).to(dtype) for n in (heads[0], heads[1], heads[1])]
    q, k, v = exact = [tensor.double().requires_grad_() for tensor in given]
    expected = sequence_at_a_time(q, k, v, here, HEAD**-0.5, window)
    upstream = torch.randn(expected.shape, generator=random).to(dtype)
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    takes = dtype == torch.bfloat16
    for way in (packed_attention.in_one_call, packed_attention.by_segment) if takes else (packed_attention.by_segment,):
        q, k, v = ours = [tensor.cuda().requires_grad_() for tensor in given]
        assert packed_attention._suits_kernel(q, v) == takes
        output = way(q, k, v, there, None, window)
        found = [output, *torch.autograd.grad(output, ours, upstream.cuda())]
        for one, other in zip(found, wanted, strict=True):
            assert (one.cpu().double() - other).norm() < allowed * other.norm(), way.__name__
