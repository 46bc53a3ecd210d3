"""Log-probs of given tokens from hidden states, without ever holding all the logits unless they are few.

Legend: N rows (one a response token), H hidden size, V vocabulary, W vocabulary entries of one tile, R rank of an adapter.

A response token's log-prob is `logit[target] - log(sum(exp(logits)))`. The logits of N rows are N x V numbers, by far the
largest thing of a training step. So the vocabulary is walked in tiles of a fixed number of bytes:

1. Forward: the tile's logits in float32, from operands in the model's dtype; its log-sum-exp is added to the running one
   of each row by logaddexp. Kept for later: hidden states, targets, log-sum-exps, and as many tiles as fit a budget of bytes.
2. Backward: each tile (kept, or computed again) becomes the gradient of its logits, `(one-hot - softmax) * upstream`. The
   difference is taken before rounding to the model's dtype, since it may be much smaller than its two terms. Each tile
   adds to the gradient of the hidden states and writes its own rows of the weight's gradient, once.

On demand the same loop adds up the squared probabilities of the vocabulary, without gradient: `sum(p**2)`, the probability
that two draws are the same token, with which WPO compares a token's own.

An adapter on the head (training.model.adapter) adds a second product to each tile, of as many columns as its rank; then the
head's own weight is frozen, and no gradient of it is computed.

The products of 1 and of the hidden states' gradient in 2 may be those of 8-bit floats (float8.py), and what is done to each
element of a tile may be compiled; both are off unless a model was prepared for it (training_setup.py).

With logits rounded to bfloat16 the summed log-prob of 400 tokens would be off by half a nat; float32 tiles avoid that.
Blockwise log-sum-exp is that of online softmax (Milakov and Gimelshein 2018); never storing the logits is the idea of
Cut Cross-Entropy (Wijmans et al. 2024).
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

# On a CPU a tile should fit into the caches and stay below the sizes that the allocator returns to the system each time; on a
# GPU it should be large enough to occupy it. Keeping all tiles would save a quarter of the head's work, for memory.
TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
KEPT_BYTES = {"cpu": 96 << 20, "cuda": 2 << 30}
# On a GPU the compiler measures which order of a sum is the fastest, and takes that, so another run, or another rank, could
# get other bits. That torch is to use deterministic algorithms does not stop it everywhere (`_dynamic_scale_rblock` in
# torch/_inductor/runtime/triton_heuristics.py).
COMPILE_OPTIONS = {"deterministic": True}
# Tiles begin at multiples of so many columns: a GPU's fast products want rows that begin at multiples of 16 bytes.
_COLUMNS = 64


@dataclass(frozen=True)
class Budget:
    """Bytes of one tile, and of all tiles that are kept from the forward to the backward pass."""

    tile: int
    kept: int

    @classmethod
    def of(cls, device: torch.device) -> "Budget":
        kind = device.type if device.type in TILE_BYTES else "cpu"
        return cls(TILE_BYTES[kind], KEPT_BYTES[kind])


def token_logprobs(
    hidden_NH: Tensor, targets_N: Tensor, head: Head, collisions: bool = False, budget: Budget | None = None
) -> tuple[Tensor, Tensor | None]:
    """The log-prob in nats of `targets_N[n]` given `hidden_NH[n]`, float32 (float64 for operands of that dtype).

    With `collisions` also the logarithm of the sum of squared probabilities of the vocabulary, which has no gradient.
    """
    budget = budget or Budget.of(hidden_NH.device)
    if not torch.is_grad_enabled():  # nothing is kept; and scores, which are compared with the reference's, are exact
        budget, head = replace(budget, kept=0), replace(head, options=replace(head.options, float8=False))
    low_NR = head.low_rank.project(hidden_NH) if head.low_rank else None
    up_VR = head.low_rank.up_VR if head.low_rank else None
    walked: tuple[Tensor, Tensor | None] = _TokenLogProbs.apply(
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
    return walked


class _TokenLogProbs(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """`ctx.tiles`: bounds of all tiles; `ctx.kept`: of the first ones, by number, `exp(logit - peak)` and each row's peak.

    A backward pass uses the former up, and leaves None.
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
            inside_N, columns_N = _places(targets_N, start, end)
            found_N = tile_NW.gather(1, columns_N[:, None])[:, 0]
            target_logits_N = torch.where(inside_N, found_N, target_logits_N)
            exps_NW, peak_N, sums_N = _run(_exponentials, head)(tile_NW)
            lse_N = torch.logaddexp(lse_N, peak_N + sums_N.log())
            if squares_N is not None:
                squares_N = torch.logaddexp(squares_N, 2 * (peak_N + exps_NW.norm(dim=1).log()))
            room -= exps_NW.nbytes
            if room >= 0:  # else no later one is kept either, though one a column narrower might fit
                ctx.kept[number] = exps_NW, peak_N
            del tile_NW, exps_NW  # so that it is freed before the next one is made
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
            del exact_NW, grad_NW  # so that it is freed before the next one is made
        return (
            None if hidden_grad is None else hidden_grad.to(hidden_NH.dtype),
            weight_grad,
            bias_grad,
            None if low_grad is None else low_grad.to(hidden_NH.dtype),
            up_grad,
            *[None] * 4,
        )


def _logit_gradient(ctx: Any, number: int, upstream_N: Tensor) -> Tensor:
    """The gradient of tile `number` before scale and softcap: `(one-hot - softmax) * upstream`, taken through both."""
    *operands, targets_N, lse_N = ctx.saved_tensors
    (start, end), head = ctx.tiles[number], ctx.head
    slope_NW = None
    if number in ctx.kept:
        exps_NW, peak_N = ctx.kept[number]
        if exps_NW is None:  # an earlier backward pass has made it the gradient: the same bits once more
            exps_NW = _run(_exponentials, head)(_logits(operands, start, end, head))[0]
        ctx.kept[number] = None, peak_N
        grad_NW = exps_NW.mul_((-upstream_N * (peak_N - lse_N).exp())[:, None])
    else:
        grad_NW = _logits(operands, start, end, head)
        if head.softcap is not None:
            slope_NW = 1 - (grad_NW / head.softcap).square()
        grad_NW = _run(_softmax_gradient, head)(grad_NW, lse_N, upstream_N)
    inside_N, columns_N = _places(targets_N, start, end)
    rows_N = torch.arange(len(targets_N), device=targets_N.device)
    grad_NW[rows_N, columns_N] += upstream_N.masked_fill(~inside_N, 0)
    if slope_NW is not None:
        grad_NW.mul_(slope_NW)
    return grad_NW if head.scale == 1 else grad_NW.mul_(head.scale)


def _logits(operands: Sequence[Tensor], start: int, end: int, head: Head) -> Tensor:
    """One tile of logits, in the wide dtype; the caller may write into it."""
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
    """`exp(logit - peak)` with the peak and the sum of each row; in place of the logits, unless it is compiled.

    Compiled, an operation in place would write to another tensor and copy it back, in a pass of its own. The peak is
    finite even where all logits of the tile are -inf, as a bias may make those of padded entries.
    """
    peak_N = tile_NW.amax(dim=1).clamp(min=torch.finfo(tile_NW.dtype).min)
    exps_NW = tile_NW - peak_N[:, None] if torch.compiler.is_compiling() else tile_NW.sub_(peak_N[:, None])
    exps_NW.exp_()
    return exps_NW, peak_N, exps_NW.sum(dim=1)


def _softmax_gradient(tile_NW: Tensor, lse_N: Tensor, upstream_N: Tensor) -> Tensor:
    """`-softmax * upstream`, in place of the logits."""
    return tile_NW.sub_(lse_N[:, None]).exp_().mul_(-upstream_N[:, None])


def _run(function: Callable[..., Any], head: Head) -> Callable[..., Any]:
    return _compiled(function) if head.options.compiled else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Fused into as few passes over a tile as possible; one kernel for tiles of all sizes."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, options=COMPILE_OPTIONS)
    return compiled


def compile_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """Compile, before the first step, what a head with `compiled` runs on tiles of operands of `dtype`."""
    rows, wide = 1024, torch.promote_types(dtype, torch.float32)
    columns = TILE_BYTES.get(device.type, TILE_BYTES["cpu"]) // (rows * wide.itemsize)
    tile_NW = torch.zeros(
        rows, columns, device=device, dtype=wide
    )  # the kernels are chosen for tiles of about this size
    with torch.no_grad():
        exps_NW, peak_N, sums_N = _compiled(_exponentials)(tile_NW)
        _compiled(_softmax_gradient)(exps_NW, sums_N, peak_N)


def _wide(operand: Tensor) -> torch.dtype:
    """The dtype in which products of `operand` are added up: float32, or float64 where it has that."""
    return torch.promote_types(operand.dtype, torch.float32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in the wide dtype, without rounding to the dtype of the operands."""
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
    """The product, rounded to the dtype of `target`; on a GPU as the gradients of all other weights are, without a copy."""
    if left.is_cuda or left.dtype == _wide(left):
        torch.mm(left, right, out=target)
    else:
        target.copy_(_product(left, right))


def _places(targets_N: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Whether each row's target lies in the tile, and in which of its columns; where it does not, some valid column.

    Selecting the rows whose target does lie in it would need their number, and so make the processor wait for the GPU.
    """
    return (targets_N >= start) & (targets_N < end), (targets_N - start).clamp(0, end - start - 1)


def _cut(vocabulary: int, column_bytes: int, tile_bytes: int) -> list[tuple[int, int]]:
    """The bounds of tiles of about equal width, of at most `tile_bytes` if a column has `column_bytes`."""
    width = max(1, tile_bytes // max(1, column_bytes))
    unit = min(width, _COLUMNS)
    tiles = -(-vocabulary // (width - width % unit))
    width = -(-vocabulary // (tiles * unit)) * unit
    return list(pairwise([*range(0, vocabulary, width), vocabulary]))
