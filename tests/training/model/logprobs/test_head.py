"""The head, compared with float64 and torch's fused loss; and its memory."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration

from training.contract.errors import ModelError
from training.model.logprobs import logprob_tiles
from training.model.logprobs.head import Head, LowRank, head_of
from training.model.logprobs.logprob_tiles import Budget

ROWS, HIDDEN, VOCABULARY = 23, 16, 101
TINY_TILE = Budget(tile=ROWS * 4 * 7, kept=0)  # at most 7 entries of the vocabulary
SOME_KEPT = Budget(tile=ROWS * 4 * 7, kept=ROWS * 4 * 7 * 5)
ALL_KEPT = Budget(tile=1 << 20, kept=1 << 20)


def token_logprobs(hidden: Tensor, targets: Tensor, head: Head, budget: Budget) -> Tensor:
    return logprob_tiles.token_logprobs(hidden, targets, head, budget=budget)[0]


def operands(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias, targets. Targets include the first and the last entry of the vocabulary."""
    random = torch.Generator().manual_seed(0)
    shapes = ((rows, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    tensors = [torch.randn(shape, generator=random) for shape in shapes]
    hidden, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    targets = torch.randint(VOCABULARY, (rows,), generator=random)
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    return hidden, weight, bias, targets


def exact_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head) -> Tensor:
    """Return the log-probs by definition, in float64."""
    weight = weight.double()
    if head.low_rank is not None:
        weight = weight + head.low_rank.scale * head.low_rank.up_VR.double() @ head.low_rank.down_RH.double()
    logits = head.scale * (hidden.double() @ weight.T + (0 if bias is None else bias.double()))
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 3.0},
    "scale and softcap": {"scale": 2.0, "softcap": 5.0},
}


@pytest.mark.parametrize("budget", [TINY_TILE, SOME_KEPT, ALL_KEPT], ids=["recomputed", "some kept", "all kept"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_values_and_gradients_equal_float64(budget: Budget, kind: str, biased: bool):
    hidden, weight, bias, targets = operands()
    inputs = [hidden, weight, *([bias] if biased else [])]
    head = Head(weight, bias if biased else None, **KINDS[kind])
    upstream = torch.linspace(-2, 1, ROWS)
    found = token_logprobs(hidden, targets, head, budget)
    expected = exact_logprobs(hidden, weight, head.bias_V, targets, head)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)
    gradients = torch.autograd.grad(found, inputs, upstream)
    exact = torch.autograd.grad(expected, inputs, upstream.double())
    torch.testing.assert_close(gradients, exact, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [TINY_TILE, SOME_KEPT, ALL_KEPT], ids=["recomputed", "some kept", "all kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences_also_in_a_second_backward_pass(budget: Budget, kind: str):
    """The first backward pass overwrites kept tiles; the second recomputes the same bits."""
    *inputs, targets = operands(torch.float64)

    def value(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return token_logprobs(hidden, targets, Head(weight, bias, **KINDS[kind]), budget)

    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)


@pytest.mark.parametrize("budget", [TINY_TILE, SOME_KEPT, ALL_KEPT], ids=["recomputed", "some kept", "all kept"])
def test_entries_with_a_bias_of_minus_infinity_are_excluded(budget: Budget):
    """They fill whole tiles. The result is the log-softmax over the other entries."""
    hidden, weight, _, targets = operands(torch.float64)
    half, targets = VOCABULARY // 2, targets % (VOCABULARY // 2)
    bias = torch.where(torch.arange(VOCABULARY) < half, 0.0, -torch.inf).double()
    found, collisions = logprob_tiles.token_logprobs(hidden, targets, Head(weight, bias), True, budget)
    expected = (hidden @ weight[:half].T).log_softmax(-1)
    torch.testing.assert_close(found, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(collisions, (2 * expected).logsumexp(-1))
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    exact = torch.autograd.grad(expected.gather(1, targets[:, None]).sum(), (hidden, weight))
    torch.testing.assert_close(gradients, exact)


@pytest.mark.parametrize("budget", [TINY_TILE, SOME_KEPT, ALL_KEPT], ids=["recomputed", "some kept", "all kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_collisions_equal_float64_and_change_no_bit_of_log_probs(budget: Budget, kind: str):
    """Collisions are log sum p^2 over the vocabulary. Gradients do not change either."""
    hidden, weight, bias, targets = operands()
    head = Head(weight, bias, **KINDS[kind])
    found, collisions = logprob_tiles.token_logprobs(hidden, targets, head, True, budget)
    all_logprobs = torch.stack(
        [exact_logprobs(hidden, weight, bias, torch.full_like(targets, v), head) for v in range(VOCABULARY)]
    )
    torch.testing.assert_close(collisions, (2 * all_logprobs).logsumexp(0).float(), atol=1e-5, rtol=0)
    assert not collisions.requires_grad
    without = token_logprobs(hidden, targets, head, budget)
    assert torch.equal(found, without)
    inputs = (hidden, weight, bias)
    for one, other in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (found, without)), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_exact_for_any_budget_of_kept_tiles():
    """The 15 tiles have 6 or 7 of 101 columns, so the rest of a budget may fit a later tile, but not the next one."""
    hidden, weight, bias, targets = operands()
    expected = exact_logprobs(hidden, weight, bias, targets, Head(weight, bias))
    exact = torch.autograd.grad(expected.sum(), (hidden, weight))
    for columns in range(VOCABULARY + 1):
        budget = Budget(TINY_TILE.tile, kept=ROWS * 4 * columns)
        found = token_logprobs(hidden, targets, Head(weight, bias), budget)
        gradients = torch.autograd.grad(found.sum(), (hidden, weight))
        torch.testing.assert_close(gradients, exact, atol=2e-5, rtol=1e-5)


def adapter(dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> LowRank:
    random = torch.Generator().manual_seed(1)
    down, up = (torch.randn(shape, generator=random).to(dtype) for shape in ((3, hidden), (vocabulary, 3)))
    return LowRank(down.requires_grad_(), up.requires_grad_(), 0.5, torch.nn.Identity())


@pytest.mark.parametrize("budget", [TINY_TILE, SOME_KEPT, ALL_KEPT], ids=["recomputed", "some kept", "all kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_frozen_head_equals_float64(budget: Budget, kind: str):
    hidden, weight, bias, targets = operands()
    low_rank = adapter()
    head = Head(weight.requires_grad_(False), bias.requires_grad_(False), low_rank=low_rank, **KINDS[kind])
    upstream, inputs = torch.linspace(-2, 1, ROWS), (hidden, low_rank.down_RH, low_rank.up_VR)
    found, expected = token_logprobs(hidden, targets, head, budget), exact_logprobs(hidden, weight, bias, targets, head)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)
    gradients = torch.autograd.grad(found, inputs, upstream)
    exact = torch.autograd.grad(expected, inputs, upstream.double())
    torch.testing.assert_close(gradients, exact, atol=2e-5, rtol=1e-5)


def test_a_zero_adapter_changes_no_bit():
    hidden, weight, _, targets = operands(torch.bfloat16)
    low_rank = adapter(torch.bfloat16)
    zero = LowRank(low_rank.down_RH, torch.zeros_like(low_rank.up_VR), 0.5, torch.nn.Identity())
    found = token_logprobs(hidden, targets, Head(weight, low_rank=zero), TINY_TILE)
    assert torch.equal(found, token_logprobs(hidden, targets, Head(weight), TINY_TILE))


def test_log_probs_equal_the_fused_loss_of_torch():
    hidden, weight, _, targets = operands()
    found = token_logprobs(hidden, targets, Head(weight), TINY_TILE)
    oracle = -linear_cross_entropy(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(found, oracle, atol=1e-5, rtol=0)
    for one, other in zip(
        torch.autograd.grad(found.sum(), (hidden, weight)),
        torch.autograd.grad(oracle.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_log_probs_of_bfloat16_operands_sum_exactly():
    """400 tokens over 4,096 entries. With logits rounded to bfloat16 the sum is off by half a nat, as the last line shows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(400, 256).bfloat16(), (0.3 * torch.randn(4096, 256)).bfloat16()
    targets = torch.randint(4096, (400,))
    found = token_logprobs(hidden, targets, Head(weight), Budget(1 << 18, 0))
    exact = exact_logprobs(hidden, weight, None, targets, Head(weight))
    assert found.dtype == torch.float32
    assert abs(float(found.double().sum() - exact.sum())) < 1e-3
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])
    assert abs(float(rounded.double().sum() - exact.sum())) > 0.1


def test_bfloat16_gradients_are_rounded_once():
    """They equal float64 on the same operands up to one rounding. With tiles of one column, the gradient of the hidden
    states is a sum over all tiles."""
    hidden, weight, _, targets = operands(torch.bfloat16)
    found = token_logprobs(hidden, targets, Head(weight), Budget(1, 0))
    expected = exact_logprobs(hidden, weight, None, targets, Head(weight))
    gradients, exact = (torch.autograd.grad(values.sum(), (hidden, weight)) for values in (found, expected))
    for one, other in zip(gradients, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other.double()).norm() < 2**-8 * other.double().norm()


@pytest.mark.parametrize("budget", [Budget(1, 0), ALL_KEPT], ids=["recomputed", "kept"])
def test_gradient_of_a_probable_token_is_not_rounded_to_zero(budget: Budget):
    """Logits 7 and 0: p is 0.99909; bfloat16 rounds it to 1. The gradient is (1 - p) (7 - 0) = 7 / (1 + e^7) = 0.006377."""
    hidden, weight = torch.ones(1, 1).bfloat16().requires_grad_(), torch.tensor([[7.0], [0.0]]).bfloat16()
    (found,) = torch.autograd.grad(token_logprobs(hidden, torch.tensor([0]), Head(weight), budget).sum(), hidden)
    assert found.item() == pytest.approx(0.006377, rel=2**-7)


def test_large_logits_do_not_overflow():
    hidden, weight = torch.full((2, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.5]])
    found = token_logprobs(hidden, torch.tensor([0, 1]), Head(weight), Budget(8, 0))
    assert found.tolist() == [0.0, -2e4]


@pytest.mark.parametrize("rows", [1, 3, ROWS])
@pytest.mark.parametrize("tile_bytes", [1, 4 * 3 * 7, 4 * 3 * 7 + 1, 4 * ROWS * VOCABULARY - 1, 4 * ROWS * VOCABULARY])
def test_no_tile_is_larger_than_its_budget(rows: int, tile_bytes: int):
    """Except a tile of a single column. Together the tiles are the vocabulary."""
    hidden, weight, _, targets = operands(rows=max(rows, 2))
    hidden, targets = hidden[:rows], targets[:rows]
    widths = tile_widths(token_logprobs(hidden, targets, Head(weight), Budget(tile_bytes, 0)))
    assert sum(widths) == VOCABULARY
    assert max(widths) == 1 or max(widths) * rows * 4 <= tile_bytes


def tile_widths(logprobs_N: Tensor) -> list[int]:
    return [end - start for start, end in logprobs_N.grad_fn.tiles]


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_operand_gets_no_gradient(frozen: str):
    hidden, weight, _, targets = operands()
    (weight if frozen == "weight" else hidden).requires_grad_(False)
    token_logprobs(hidden, targets, Head(weight), TINY_TILE).sum().backward()
    assert (weight.grad is None, hidden.grad is None) == (frozen == "weight", frozen == "hidden")


def test_zero_rows_give_an_empty_result_and_zero_gradients():
    hidden, weight, _, targets = operands()
    found = token_logprobs(hidden[:0], targets[:0], Head(weight), TINY_TILE)
    found.sum().backward()
    assert found.shape == (0,) and not weight.grad.any() and not hidden.grad.any()


class Memory(TorchDispatchMode):
    """Records the peak bytes of the tensors that were created inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = [
            t.untyped_storage()._cdata for t in itertools.chain(args, (kwargs or {}).values()) if torch.is_tensor(t)
        ]
        for tensor in result if isinstance(result, tuple) else (result,):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("kept_tiles", [0, 3])
def test_memory_is_one_tile_gradients_and_a_few_numbers_per_row(kept_tiles: int):
    rows, hidden_size, vocabulary, tile = 300, 32, 20_000, 1 << 20
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    with Memory() as forward:
        found = token_logprobs(hidden, targets, Head(weight), Budget(tile, kept_tiles * tile))
    with Memory() as backward:
        found.sum().backward()
    with Memory() as both:
        token_logprobs(hidden, targets, Head(weight), Budget(tile, kept_tiles * tile)).sum().backward()
    row_bytes = rows * (2 * hidden_size + 20) * 4
    assert tile // 2 < forward.peak <= (1 + kept_tiles) * tile + row_bytes
    assert weight.nbytes < backward.peak <= tile + weight.nbytes + row_bytes
    assert both.peak <= max(kept_tiles, 1) * tile + weight.nbytes + row_bytes, "kept tiles are reused and freed"
    assert rows * vocabulary * 4 > 20 * tile, "all logits would take far more"


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_the_gradient_of_a_frozen_operand_takes_no_memory(frozen: str):
    """20,000 x 32 weights and 300 rows."""
    hidden, weight = torch.randn(300, 32), torch.randn(20_000, 32)
    (hidden if frozen == "weight" else weight).requires_grad_()
    found = token_logprobs(hidden, torch.randint(20_000, (300,)), Head(weight), Budget(1 << 20, 0))
    with Memory() as backward:
        found.sum().backward()
    gradient_bytes = hidden.nbytes if frozen == "weight" else weight.nbytes
    assert gradient_bytes < backward.peak <= (1 << 20) + gradient_bytes + 300 * 20 * 4
    assert weight.nbytes > 1 << 21


@pytest.mark.parametrize("adapted", [False, True], ids=["alone", "with an adapter"])
def test_a_frozen_head_needs_no_memory_for_its_gradient(adapted: bool):
    rows, hidden_size, vocabulary, tile = 300, 32, 40_000, 1 << 20
    hidden, weight = torch.randn(rows, hidden_size, requires_grad=True), torch.randn(vocabulary, hidden_size)
    targets = torch.randint(vocabulary, (rows,))
    low_rank = adapter(vocabulary=vocabulary, hidden=hidden_size) if adapted else None
    found = token_logprobs(hidden, targets, Head(weight, low_rank=low_rank), Budget(tile, 0))
    with Memory() as backward:
        found.sum().backward()
    trained = low_rank.up_VR.nbytes if low_rank else 0
    assert tile // 2 < backward.peak <= tile + trained + rows * (2 * hidden_size + 40) * 4
    assert backward.peak < weight.nbytes and weight.grad is None and hidden.grad.any()


def test_without_gradients_no_tile_is_kept():
    hidden, weight, _, targets = operands(rows=200)
    with Memory() as memory, torch.no_grad():
        token_logprobs(hidden, targets, Head(weight), Budget(200 * 4 * 10, 1 << 30))
    assert memory.peak < 200 * 4 * (10 + 20)


def test_a_nonlinear_head_raises():
    config = T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)
    model = T5ForConditionalGeneration(config)
    model.lm_head = torch.nn.Bilinear(8, 8, 32)
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration is Bilinear; .* \[unsupported-head\]"):
        head_of(model)


@pytest.mark.parametrize("vocabulary", [61, 640, 32_768, 50_257, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("rows", [1, 7, 200, 1_750, 8_200, 300_000])
def test_tiles_cover_the_vocabulary_are_aligned_and_fit_the_budget(vocabulary: int, rows: int):
    """Tiles start at multiples of 64 columns (128 bytes in bfloat16; a GPU needs 16), unless the budget is smaller."""
    column, budget = 4 * rows, 64 << 20
    bounds = logprob_tiles._cut(vocabulary, column, budget)
    assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, vocabulary) and all(start < end for start, end in bounds)
    assert max(end - start for start, end in bounds) * column <= budget
    assert budget < 64 * column or all(start % 64 == 0 for start, _ in bounds)
