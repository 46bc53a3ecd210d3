"""Errors of both ways of attention over a row, against float64 on the same operands, for `benchmarks.gpu`.

Each relative error is ||found - exact|| / ||exact||; for gradients it covers queries, keys and values together.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from training.model.attention.packed_attention import by_segment, in_one_call
from training.model.attention.shared_prefix import PackedAttentionPlan, TokenSequence, build_row

HEADS, KV_HEADS, HEAD = 16, 4, 64
LENGTHS = [(700, 300, 120), (90, 40, 500), (256, 128, 128, 7)]  # a prompt and its responses, some tokens each


def errors(device: str) -> Iterator[list[str]]:
    """Return a row for each way that runs on `device`, with and without a window."""
    on, random = torch.device(device), torch.Generator().manual_seed(0)
    groups = [list(_group(*lengths)) for lengths in LENGTHS]
    plan, exactly = build_row(groups, on).plan, build_row(groups, torch.device("cpu")).plan
    tokens = sum(plan.lengths)
    given = [torch.randn(1, n, tokens, HEAD, generator=random).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)]
    upstream = torch.randn(1, tokens, HEADS, HEAD, generator=random).bfloat16()
    ways = {"a segment at a time": by_segment} | ({"in one call": in_one_call} if device == "cuda" else {})
    for window in (None, 100):
        exact = _run(by_segment, [tensor.double() for tensor in given], exactly, window, upstream.double())
        for name, way in ways.items():
            found = _run(way, [tensor.to(on) for tensor in given], plan, window, upstream.to(on))
            shown = [f"{_error(f, e):.1e}" for f, e in zip(found, exact, strict=True)]
            yield [f"{name}, {'no window' if window is None else f'window of {window}'}", *shown]


def _group(prompt: int, *responses: int) -> Iterator[TokenSequence]:
    for number, length in enumerate(responses):
        ids = torch.cat([torch.full((prompt,), 99), torch.full((length,), number)])
        yield TokenSequence(ids, torch.arange(len(ids)) >= prompt)


def _run(
    way: Callable[..., Tensor], given: list[Tensor], plan: PackedAttentionPlan, window: int | None, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the values, and all gradients in a row."""
    operands = [tensor.clone().requires_grad_() for tensor in given]
    output = way(*operands, plan, None, window)
    gradients = torch.autograd.grad(output, operands, upstream)
    return output.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())
