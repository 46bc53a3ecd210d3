"""Log-probs of given tokens from hidden states, without storing all logits.

Legend: N rows (one per response token), H hidden size, V vocabulary, W vocabulary entries of one tile, R rank of an adapter.

A response token's log-prob is `logit[target] - log(sum(exp(logits)))`. The N x V logits would be the largest tensor of a
training step by far. So we walk the vocabulary in tiles of a fixed number of bytes:

1. Forward: compute the tile's logits in float32, from operands in the model's dtype. Add its log-sum-exp to each row's
   running one by logaddexp. Keep hidden states, targets, log-sum-exps, and as many tiles as fit into a budget of bytes.
2. Backward: turn each tile (kept or recomputed) into the gradient of its logits, `(one-hot - softmax) * upstream`. Take the
   difference before rounding to the model's dtype: it may be much smaller than its two terms. Each tile adds to the gradient
   of the hidden states and writes its rows of the weight's gradient once.

With `collisions` the same loop adds up squared probabilities, without gradient: `sum(p**2)`, the probability that two draws
are the same token. WPO compares a token's probability with it.

An adapter on the head (training.model.adapter) adds a product of inner size R to each tile. Then the head's weight is
frozen and gets no gradient.

The logits and the hidden states' gradient may use 8-bit floats (float8.py), and the elementwise operations may be compiled.
Both are off by default (training_setup.py).

With bfloat16 logits the summed log-prob of 400 tokens would be off by half a nat, so tiles are float32. The blockwise
log-sum-exp is from online softmax (Milakov and Gimelshein 2018). Cut Cross-Entropy (Wijmans et al. 2024) does not store the
logits either.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.model.logprobs.float8 import float8_product
from training.model.logprobs.head import Head

# On a CPU a tile should fit into the caches and stay below the sizes that the allocator returns to the system. On a GPU it
# should be large enough to occupy the device. Keeping all tiles would save a quarter of the head's work, at a cost of memory.
TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
KEPT_BYTES = {"cpu": 96 << 20, "cuda": 2 << 30}
# On a GPU the compiler benchmarks orders of a sum and takes the fastest, so another run or rank could get other bits. Torch's
# deterministic algorithms do not prevent this everywhere (`_dynamic_scale_rblock` in
# torch/_inductor/runtime/triton_heuristics.py).
COMPILE_OPTIONS = {"deterministic": True}
# Tiles begin at multiples of this number of columns: fast products on a GPU need rows that begin at multiples of 16 bytes.
_COLUMNS = 64


@dataclass(frozen=True)
class Budget:
    """Bytes of one tile, and of all tiles kept from the forward to the backward pass."""

    tile: int
    kept: int

    @classmethod
    def of(cls, device: torch.device) -> "Budget":
        kind = device.type if device.type in TILE_BYTES else "cpu"
        return cls(TILE_BYTES[kind], KEPT_BYTES[kind])


def token_logprobs(
    hidden_NH: Tensor, targets_N: Tensor, head: Head, collisions: bool = False, budget: Budget | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob in nats of `targets_N[n]` given `hidden_NH[n]`: float32, or float64 for such operands.

    With `collisions`, also return the logarithm of the sum of squared probabilities over the vocabulary, without gradient.
    """
    budget = budget or Budget.of(hidden_NH.device)
    if not torch.is_grad_enabled():  # keep no tiles; use exact products, as for the reference log-probs
        budget, head = replace(budget, kept=0), replace(head, options=replace(head.options, float8=False))
    low_NR = head.low_rank.project(hidden_NH) if head.low_rank else None
    up_VR = head.low_rank.up_VR if head.low_rank else None
    logprobs_and_collisions: tuple[Tensor, Tensor | None] = _TokenLogProbs.apply(
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        low_NR,
        up_VR,
        targets_N,
        head,
        budget,
        collisions,
    )
    return logprobs_and_collisions


class _TokenLogProbs(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """The autograd function. `ctx.tiles`: bounds of all tiles; `ctx.kept`: `exp(logit - peak)` and peaks of the first tiles.

    A backward pass overwrites the exponentials, and leaves None instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        low_NR: Tensor | None,
        up_VR: Tensor | None,
        targets_N: Tensor,
        head: Head,
        budget: Budget,
        with_collisions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        operands = (hidden_NH, weight_VH, bias_V, low_NR, up_VR)
        wide = _wide(hidden_NH)
        ctx.tiles = _cut(len(weight_VH), len(hidden_NH) * wide.itemsize, budget.tile)
        ctx.kept = {}
        lse_N = torch.full_like(targets_N, -torch.inf, dtype=wide)
        squares_N = lse_N.clone() if with_collisions else None
        target_logits_N = torch.zeros_like(lse_N)
        room = budget.kept if head.softcap is None else 0
        for number, (start, end) in enumerate(ctx.tiles):
            tile_NW = _logits(operands, start, end, head)
            inside_N, columns_N = _locate_targets(targets_N, start, end)
            tile_logits_N = tile_NW.gather(1, columns_N[:, None])[:, 0]
            target_logits_N = torch.where(inside_N, tile_logits_N, target_logits_N)
            exps_NW, peak_N, sums_N = _run(_exponentials, head)(tile_NW)
            lse_N = torch.logaddexp(lse_N, peak_N + sums_N.log())
            if squares_N is not None:
                squares_N = torch.logaddexp(squares_N, 2 * (peak_N + exps_NW.norm(dim=1).log()))
            room -= exps_NW.nbytes
            if room >= 0:  # once negative, no later tile is kept either, though a narrower one might fit
                ctx.kept[number] = exps_NW, peak_N
            del tile_NW, exps_NW  # free the tile before the next one
        ctx.head = head
        ctx.save_for_backward(*operands, targets_N, lse_N)
        collisions_N = None if squares_N is None else squares_N - 2 * lse_N
        if collisions_N is not None:
            ctx.mark_non_differentiable(collisions_N)
        return target_logits_N - lse_N, collisions_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream_N: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, low_NR, up_VR = ctx.saved_tensors[:5]
        wants_hidden, wants_weight, wants_bias, wants_low, wants_up = ctx.needs_input_grad[:5]
        hidden_grad = torch.zeros_like(hidden_NH, dtype=_wide(hidden_NH)) if wants_hidden else None
        weight_grad = torch.empty_like(weight_VH) if wants_weight else None
        bias_grad = torch.empty_like(bias_V) if wants_bias and bias_V is not None else None
        low_grad = torch.zeros_like(low_NR, dtype=_wide(hidden_NH)) if wants_low else None
        up_grad = torch.empty_like(up_VR) if wants_up else None
        for number, (start, end) in enumerate(ctx.tiles):
            exact_NW = _logit_gradient(ctx, number, upstream_N)
            if bias_grad is not None:
                bias_grad[start:end] = exact_NW.sum(dim=0)
            grad_NW = exact_NW.to(hidden_NH.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, grad_NW, weight_VH[start:end], ctx.head.options.float8)
            if weight_grad is not None:
                _write_product(weight_grad[start:end], grad_NW.T, hidden_NH)
            if low_grad is not None:
                _add_product(low_grad, grad_NW, up_VR[start:end])
            if up_grad is not None:
                _write_product(up_grad[start:end], grad_NW.T, low_NR)
            del exact_NW, grad_NW  # free the tile before the next one
        return (
            None if hidden_grad is None else hidden_grad.to(hidden_NH.dtype),
            weight_grad,
            bias_grad,
            None if low_grad is None else low_grad.to(hidden_NH.dtype),
            up_grad,
            *[None] * 4,
        )


def _logit_gradient(ctx: Any, number: int, upstream_N: Tensor) -> Tensor:
    """Return `(one-hot - softmax) * upstream` for tile `number`, propagated back through softcap and scale."""
    *operands, targets_N, lse_N = ctx.saved_tensors
    (start, end), head = ctx.tiles[number], ctx.head
    slope_NW = None
    if number in ctx.kept:
        exps_NW, peak_N = ctx.kept[number]
        if exps_NW is None:  # an earlier backward pass overwrote it: recompute the same bits
            exps_NW = _run(_exponentials, head)(_logits(operands, start, end, head))[0]
        ctx.kept[number] = None, peak_N
        grad_NW = exps_NW.mul_((-upstream_N * (peak_N - lse_N).exp())[:, None])
    else:
        grad_NW = _logits(operands, start, end, head)
        if head.softcap is not None:
            slope_NW = 1 - (grad_NW / head.softcap).square()
        grad_NW = _run(_softmax_gradient, head)(grad_NW, lse_N, upstream_N)
    inside_N, columns_N = _locate_targets(targets_N, start, end)
    rows_N = torch.arange(len(targets_N), device=targets_N.device)
    grad_NW[rows_N, columns_N] += upstream_N.masked_fill(~inside_N, 0)
    if slope_NW is not None:
        grad_NW.mul_(slope_NW)
    return grad_NW if head.scale == 1 else grad_NW.mul_(head.scale)


def _logits(operands: Sequence[Tensor], start: int, end: int, head: Head) -> Tensor:
    """Return one tile of logits in the accumulation dtype. The caller may overwrite it."""
    hidden_NH, weight_VH, bias_V, low_NR, up_VR = operands
    weight_WH = weight_VH[start:end]
    tile_NW = float8_product(hidden_NH, weight_WH.T) if head.options.float8 else _product(hidden_NH, weight_WH.T)
    if up_VR is not None:
        _add_product(tile_NW, low_NR, up_VR[start:end].T)
    if bias_V is not None:
        tile_NW.add_(bias_V[start:end])
    if head.scale != 1:
        tile_NW.mul_(head.scale)
    return tile_NW if head.softcap is None else tile_NW.div_(head.softcap).tanh_().mul_(head.softcap)


def _exponentials(tile_NW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(logit - peak)`, the peak and the sum of each row. Overwrite the logits, unless compiled.

    Compiled in-place operations would write to another tensor and copy it back in a separate pass. The peak is finite even if
    all logits of the tile are -inf, for example by a bias on padded entries.
    """
    peak_N = tile_NW.amax(dim=1).clamp(min=torch.finfo(tile_NW.dtype).min)
    exps_NW = tile_NW - peak_N[:, None] if torch.compiler.is_compiling() else tile_NW.sub_(peak_N[:, None])
    exps_NW.exp_()
    return exps_NW, peak_N, exps_NW.sum(dim=1)


def _softmax_gradient(tile_NW: Tensor, lse_N: Tensor, upstream_N: Tensor) -> Tensor:
    """Overwrite the logits with `-softmax * upstream`."""
    return tile_NW.sub_(lse_N[:, None]).exp_().mul_(-upstream_N[:, None])


def _run(function: Callable[..., Any], head: Head) -> Callable[..., Any]:
    return _compiled(function) if head.options.compiled else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled into few passes over a tile, with one kernel for all tile sizes."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, options=COMPILE_OPTIONS)
    return compiled


def compile_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the functions of a head with `compiled`, for tiles of operands of `dtype`, before the first step."""
    rows, wide = 1024, torch.promote_types(dtype, torch.float32)
    columns = TILE_BYTES.get(device.type, TILE_BYTES["cpu"]) // (rows * wide.itemsize)
    tile_NW = torch.zeros(rows, columns, device=device, dtype=wide)  # kernels are chosen for tiles of about this size
    with torch.no_grad():
        exps_NW, peak_N, sums_N = _compiled(_exponentials)(tile_NW)
        _compiled(_softmax_gradient)(exps_NW, sums_N, peak_N)


def _wide(operand: Tensor) -> torch.dtype:
    """Return the accumulation dtype for products of `operand`: float32, or float64 for a float64 operand."""
    return torch.promote_types(operand.dtype, torch.float32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` in the accumulation dtype, without rounding to the operands' dtype."""
    wide = _wide(left)
    if left.dtype == wide:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _add_product(total: Tensor, left: Tensor, right: Tensor, float8: bool = False) -> None:
    if float8:
        total.add_(float8_product(left, right))
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_product(left, right))


def _write_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Write the product, rounded to the dtype of `target`. On a GPU this makes no copy, as for all other weights."""
    if left.is_cuda or left.dtype == _wide(left):
        torch.mm(left, right, out=target)
    else:
        target.copy_(_product(left, right))


def _locate_targets(targets_N: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Return whether each row's target is in the tile, and its column; a valid column also for targets outside.

    Selecting the rows with targets in the tile would make the CPU wait for their number.
    """
    return (targets_N >= start) & (targets_N < end), (targets_N - start).clamp(0, end - start - 1)


def _cut(vocabulary: int, column_bytes: int, tile_bytes: int) -> list[tuple[int, int]]:
    """Return the bounds of tiles of about equal width, with at most `tile_bytes` for columns of `column_bytes`."""
    width = max(1, tile_bytes // max(1, column_bytes))
    unit = min(width, _COLUMNS)
    tiles = -(-vocabulary // (width - width % unit))
    width = -(-vocabulary // (tiles * unit)) * unit
    return list(pairwise([*range(0, vocabulary, width), vocabulary]))
