"""Products of 8-bit floats against float64, on the processor, which has the same numbers as a GPU's tensor cores."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.model.logprobs.float8 import float8_product
from training.model.logprobs.head import Head, HeadOptions
from training.model.logprobs.logprob_tiles import Budget, token_logprobs

FLOAT8 = HeadOptions(float8=True)
TILE = Budget(1 << 22, 0)


def rounded_by_hand(rows: Tensor) -> Tensor:
    """Each row scaled to a largest number of 448, rounded to e4m3 (3 bits after the first, none below 2**-9)."""
    scale = rows.double().abs().amax(dim=1, keepdim=True) / 448
    scaled = rows.double() / scale
    unit = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / unit).round() * unit * scale


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 16, 16), (5, 40, 21), (33, 256, 1000)])
def test_a_product_is_that_of_rounded_operands(rows: int, inner: int, columns: int):
    """Sizes that are no multiple of 16 too. What is left over is the product's rounding to bfloat16, half of 2**-7."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, inner, generator=random), torch.randn(inner, columns, generator=random)
    found, expected = float8_product(left, right), rounded_by_hand(left) @ rounded_by_hand(right.T).T
    assert (found.shape, found.dtype) == ((rows, columns), torch.float32)
    assert ((found - expected).abs() <= 2.0**-8 * expected.abs() + 1e-3 * expected.std()).all()


def test_a_row_of_zeros_stays_one():
    assert not float8_product(torch.zeros(2, 16), torch.ones(16, 3)).any()


class Watch(TorchDispatchMode):
    """Notes rows, terms and columns of the products of 8-bit floats within the block, and the bytes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int]] = []
        self.written = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._scaled_mm.default:
            self.products.append((*args[0].shape, args[1].shape[1]))
        if not function.is_view:
            self.written += made.nbytes if torch.is_tensor(made) else 0
        return made


@pytest.mark.parametrize(("way", "bytes_a_weight"), [("of logits", 5), ("of hidden states", 6)])
def test_the_weights_are_written_as_often_as_it_takes(way: str, bytes_a_weight: int):
    """Their quotients by the scale are float32 and rounded to 8 bits, which are laid out anew where columns become rows."""
    weight_VH = torch.randn(4_096, 512).bfloat16()
    right = weight_VH.T if way == "of logits" else weight_VH
    with Watch() as watch:
        float8_product(torch.randn(1, len(right)).bfloat16(), right)
    assert bytes_a_weight * weight_VH.numel() < watch.written < 1.1 * bytes_a_weight * weight_VH.numel()


def test_no_sum_is_longer_than_kernels_for_few_rows_take():
    """9,216 terms for 127 rows of 3,072 columns are refused on an H100, and 3,072 terms are not (pytorch/ao, issue 4582)."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 32, generator=random), torch.randn(9_300, 32, generator=random)
    hidden, weight = (operand.bfloat16().requires_grad_() for operand in (hidden, weight))
    targets = torch.randint(9_300, (6,), generator=random)
    with Watch() as watch:
        found = token_logprobs(hidden, targets, Head(weight, options=FLOAT8), budget=TILE)[0]
        [ours] = torch.autograd.grad(found.sum(), hidden)
        wide = float8_product(torch.ones(2, 9_216), torch.ones(9_216, 16))
    assert wide.equal(torch.full((2, 16), 9_216.0))
    assert {columns for _, _, columns in watch.products} == {9_312, 32, 16}
    assert max(terms for _, terms, _ in watch.products) <= 3_072
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])
    [right] = torch.autograd.grad(exact.sum(), hidden)
    assert (ours.double() - right.double()).norm() < 0.1 * right.double().norm()


ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device that multiplies 8-bit floats",
)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])]


def operands(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """400 tokens of a vocabulary of 8,192; logits with a standard deviation of 3.2, which models have."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(400, 512, generator=random), 0.14 * torch.randn(8_192, 512, generator=random)
    targets = torch.randint(8_192, (400,), generator=random)
    hidden, weight = (operand.bfloat16().to(device).requires_grad_() for operand in (hidden, weight))
    return hidden, weight, targets.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_it_costs(device: str):
    """A token's log-prob is off by 3.7% of the spread of the logits: 0.12 nats here, and the sum of 400 tokens by a few nats.

    That is a thousand times the error of the exact head, so what is scored without gradients is never scored this way.
    """
    hidden, weight, targets = operands(device)
    logits = hidden.double() @ weight.double().T
    exact = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = token_logprobs(hidden, targets, Head(weight, options=FLOAT8), budget=TILE)[0]
    errors = found.detach().double() - exact.detach()
    assert 0.03 < errors.square().mean().sqrt() / logits.std() < 0.045
    assert abs(errors.sum()) < 10
    ours, right = (torch.autograd.grad(of.sum(), (hidden, weight)) for of in (found, exact))
    for one, other in zip(ours, right, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other.double()).norm() < 0.05 * other.double().norm()
    with torch.no_grad():
        scored = token_logprobs(hidden, targets, Head(weight, options=FLOAT8), budget=TILE)[0]
    assert abs(scored.double().sum() - exact.sum()) < 1e-2


@pytest.mark.gpu
@ON_GPU
def test_on_a_gpu_a_product_is_that_of_rounded_operands():
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(37, 256, generator=random), torch.randn(256, 1001, generator=random)
    expected = (rounded_by_hand(left) @ rounded_by_hand(right.T).T).float()
    torch.testing.assert_close(float8_product(left.cuda(), right.cuda()).cpu(), expected, atol=1e-2, rtol=2.0**-7)
