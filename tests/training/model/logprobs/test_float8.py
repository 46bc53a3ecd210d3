"""Products of 8-bit floats, compared with float64. The CPU has the same number format as a GPU's tensor cores."""

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
    """Scale each row to a largest number of 448, and round to e4m3 (3 bits after the first, multiples of 2**-9)."""
    scale = rows.double().abs().amax(dim=1, keepdim=True) / 448
    scaled = rows.double() / scale
    unit = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / unit).round() * unit * scale


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 16, 16), (5, 40, 21), (33, 256, 1000)])
def test_float8_product_equals_the_product_of_rounded_operands(rows: int, inner: int, columns: int):
    """Some sizes are not multiples of 16. The tolerance is the product's rounding to bfloat16, half of 2**-7."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, inner, generator=random), torch.randn(inner, columns, generator=random)
    found, expected = float8_product(left, right), rounded_by_hand(left) @ rounded_by_hand(right.T).T
    assert (found.shape, found.dtype) == ((rows, columns), torch.float32)
    assert ((found - expected).abs() <= 2.0**-8 * expected.abs() + 1e-3 * expected.std()).all()


def test_float8_product_of_zero_rows_is_zero():
    assert not float8_product(torch.zeros(2, 16), torch.ones(16, 3)).any()


class Watch(TorchDispatchMode):
    """Records rows, terms and columns of 8-bit products within the block, and the bytes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int]] = []
        self.written = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._scaled_mm.default:
            self.products.append((*args[0].shape, args[1].shape[1]))
        if not function.is_view:
            self.written += result.nbytes if torch.is_tensor(result) else 0
        return result


@pytest.mark.parametrize(("product", "bytes_per_weight"), [("of logits", 5), ("of hidden states", 6)])
def test_float8_product_writes_five_or_six_bytes_per_weight(product: str, bytes_per_weight: int):
    """Once in float32, divided by the scale, and once in 8 bits. A transposed operand is copied once more in 8 bits."""
    weight_VH = torch.randn(4_096, 512).bfloat16()
    right = weight_VH.T if product == "of logits" else weight_VH
    with Watch() as watch:
        float8_product(torch.randn(1, len(right)).bfloat16(), right)
    assert bytes_per_weight * weight_VH.numel() < watch.written < 1.1 * bytes_per_weight * weight_VH.numel()


def test_sums_are_short_enough_for_kernels_with_few_rows():
    """An H100 lacks a kernel for 127 rows with 9,216 terms, but has one for 3,072 terms (pytorch/ao, issue 4582)."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 32, generator=random), torch.randn(9_300, 32, generator=random)
    hidden, weight = (operand.bfloat16().requires_grad_() for operand in (hidden, weight))
    targets = torch.randint(9_300, (6,), generator=random)
    with Watch() as watch:
        found = token_logprobs(hidden, targets, Head(weight, options=FLOAT8), budget=TILE)[0]
        [gradient] = torch.autograd.grad(found.sum(), hidden)
        long_sum = float8_product(torch.ones(2, 9_216), torch.ones(9_216, 16))
    assert long_sum.equal(torch.full((2, 16), 9_216.0))
    assert {columns for _, _, columns in watch.products} == {9_312, 32, 16}
    assert max(terms for _, terms, _ in watch.products) <= 3_072
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])
    [expected] = torch.autograd.grad(exact.sum(), hidden)
    assert (gradient.double() - expected.double()).norm() < 0.1 * expected.double().norm()


ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device that multiplies 8-bit floats",
)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])]


def operands(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands of 400 tokens and 8,192 entries. Logits have a standard deviation of 3.2, as in real models."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(400, 512, generator=random), 0.14 * torch.randn(8_192, 512, generator=random)
    targets = torch.randint(8_192, (400,), generator=random)
    hidden, weight = (operand.bfloat16().to(device).requires_grad_() for operand in (hidden, weight))
    return hidden, weight, targets.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_float8_errors_of_log_probs_and_gradients_are_bounded(device: str):
    """A token's error is 3.7% of the logits' standard deviation, here 0.12 nats; the sum of 400 tokens is off by a few nats.

    This is a thousand times the error of the exact head, so scoring without gradients never uses float8.
    """
    hidden, weight, targets = operands(device)
    logits = hidden.double() @ weight.double().T
    exact = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = token_logprobs(hidden, targets, Head(weight, options=FLOAT8), budget=TILE)[0]
    errors = found.detach().double() - exact.detach()
    assert 0.03 < errors.square().mean().sqrt() / logits.std() < 0.045
    assert abs(errors.sum()) < 10
    gradients, expected = (torch.autograd.grad(values.sum(), (hidden, weight)) for values in (found, exact))
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other.double()).norm() < 0.05 * other.double().norm()
    with torch.no_grad():
        scored = token_logprobs(hidden, targets, Head(weight, options=FLOAT8), budget=TILE)[0]
    assert abs(scored.double().sum() - exact.sum()) < 1e-2


@pytest.mark.gpu
@ON_GPU
def test_float8_product_on_a_gpu_equals_the_product_of_rounded_operands():
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(37, 256, generator=random), torch.randn(256, 1001, generator=random)
    expected = (rounded_by_hand(left) @ rounded_by_hand(right.T).T).float()
    torch.testing.assert_close(float8_product(left.cuda(), right.cuda()).cpu(), expected, atol=1e-2, rtol=2.0**-7)
