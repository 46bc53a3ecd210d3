"""Losses against formulas in plain float64, hand-derived numbers and numerical gradients."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training.contract.config.loss import Loss, LossType
from training.losses.batchwise import RunningMean, batch_context
from training.losses.inputs import LossInputs, PairLogProbs, bounded_exp
from training.losses.preference import LOSSES, PairLosses, preference_loss

LOGPROBS = st.floats(-500, 0)
BETA = 0.3
LN2 = math.log(2)
# Every type with settings that it accepts.
SETTINGS: dict[str, dict[str, Any]] = {kind: {"type": kind, "beta": BETA} for kind in LossType} | {
    "robust": {"type": "robust", "beta": BETA, "label_smoothing": 0.1},
    "exo_pair": {"type": "exo_pair", "beta": BETA, "label_smoothing": 0.01},
    "mixture": {"type": "mixture", "beta": BETA, "of": [{"type": "sigmoid", "weight": 2}, {"type": "ipo"}]},
}
PREFERENCES = [kind for kind in LossType if kind.traits.compares_responses]


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_pair(*values: float, tokens: tuple[int, int] = (1, 1)) -> PairLogProbs:
    chosen, rejected, ref_chosen, ref_rejected = values
    return PairLogProbs(tensor([chosen, rejected]), tensor([ref_chosen, ref_rejected]), torch.tensor([tokens]))


def loss_of(logprobs: PairLogProbs, **settings: Any) -> PairLosses:
    return preference_loss(Loss.model_validate(settings), logprobs)


def log1p_exp(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def test_every_type_has_its_function():
    assert set(LOSSES) | {LossType.MIXTURE} == set(LossType)


def test_an_exponential_goes_on_along_its_tangent():
    """e^x up to x = 30; beyond, e^30 (1 + x - 30) with the slope e^30: a pair that is far off is still pulled back."""
    exponents = tensor(-2.0, 29.0, 31.0, 40.0).requires_grad_()
    found = bounded_exp(exponents)
    found.sum().backward()
    assert found.tolist() == pytest.approx([math.exp(-2), math.exp(29), 2 * math.exp(30), 11 * math.exp(30)])
    assert exponents.grad.tolist() == pytest.approx([math.exp(-2), math.exp(29), math.exp(30), math.exp(30)])


@given(LOGPROBS, LOGPROBS, LOGPROBS, LOGPROBS, st.floats(0.01, 5), st.floats(0, 0.49))
def test_sigmoid_is_the_formula_of_the_paper(
    chosen: float, rejected: float, ref_chosen: float, ref_rejected: float, beta: float, smoothing: float
):
    """-log sigmoid(m) = log(1 + exp(-m)), with m = beta ((chosen - ref) - (rejected - ref)), by `math` alone; with label
    smoothing e the conservative DPO of Mitchell (2023), (1-e) log(1 + exp(-m)) + e log(1 + exp(m))."""
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    expected = (1 - smoothing) * log1p_exp(-margin) + smoothing * log1p_exp(margin)
    found = loss_of(one_pair(chosen, rejected, ref_chosen, ref_rejected), beta=beta, label_smoothing=smoothing)
    assert found.losses_B.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.margins_B.item() == pytest.approx(margin, rel=1e-9, abs=1e-9)


@given(st.floats(0.01, 0.49))
def test_robust_losses_are_unbiased(smoothing: float):
    """Swapping labels with probability e, the mean of the robust loss is the loss of clean labels."""
    straight, swapped = one_pair(-3, -9, -4, -7), one_pair(-9, -3, -7, -4)
    clean = loss_of(straight, beta=BETA).losses_B
    noisy = [
        loss_of(pair, type="robust", beta=BETA, label_smoothing=smoothing).losses_B for pair in (straight, swapped)
    ]
    assert float((1 - smoothing) * noisy[0] + smoothing * noisy[1]) == pytest.approx(float(clean), rel=1e-9)


AT_ZERO_MARGIN = {
    "sigmoid": LN2,
    "robust": LN2,
    "hinge": 1.0,
    "ipo": (1 / (2 * BETA)) ** 2,
    "ipo_sum": (1 / (2 * BETA)) ** 2,
    "dpo_norm": LN2,
    "exo_pair": -LN2 - math.log(0.01 * 0.99) / 2,
    "nca_pair": 2 * LN2,
    "bco_pair": 2 * LN2,
    "sppo_hard": 2 * (1 / (2 * BETA)) ** 2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "aot": LN2,
    "aot_unpaired": LN2,
    "discopop": (LN2 + 1) / 2,
    "mixture": 2 * LN2 + (1 / (2 * BETA)) ** 2,
}


@pytest.mark.parametrize("kind", AT_ZERO_MARGIN)
def test_the_value_at_zero_margin_is_a_constant_of_the_loss(kind: str, ragged: Any):
    """By hand: s(0) = 1/2; exo_pair is ln(1/2) - (ln e + ln(1-e)) / 2. Whatever the pairs and their lengths."""
    pairs = ragged(spread=0.0)
    assert pairs.loss(**SETTINGS[kind]).losses_B.mean().item() == pytest.approx(AT_ZERO_MARGIN[kind], rel=1e-12)


def test_simpo_has_no_such_constant():
    """Without a reference the loss of the reference's own log-probs is a fact of the data: -4/2 and -9/3 nats a token, so
    log(1 + exp(-(2 * (-2 + 3) - 0.5))) = log(1 + exp(-1.5))."""
    pair = one_pair(-4, -9, -4, -9, tokens=(2, 3))
    found = loss_of(pair, type="simpo", beta=2, gamma=0.5)
    assert found.losses_B.item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-12)
    assert found.rewards_B2.tolist() == [[-4.0, -6.0]]


def test_cpo_by_hand():
    """Sums, whatever the lengths: log(1 + exp(-0.5 * (-4 + 9))), and rewards of the log-probs themselves."""
    found = loss_of(one_pair(-4, -9, -1, -1, tokens=(2, 3)), type="cpo", beta=0.5)
    assert found.losses_B.item() == pytest.approx(math.log1p(math.exp(-2.5)), rel=1e-12)
    assert found.rewards_B2.tolist() == [[-2.0, -4.5]]


def test_orpo_by_hand():
    """Tokens of probability 3/4 and 1/5 have odds of 3 and 1/4: s(log 12) is 12/13."""
    pair = one_pair(2 * math.log(3 / 4), 3 * math.log(1 / 5), -1, -1, tokens=(2, 3))
    found = loss_of(pair, type="orpo", beta=0.1)
    assert found.losses_B.item() == pytest.approx(-0.1 * math.log(12 / 13), rel=1e-12)
    assert found.rewards_B2[0].tolist() == pytest.approx([0.1 * math.log(3 / 4), 0.1 * math.log(1 / 5)])


@pytest.mark.parametrize("certain", [0.0, 1e-7])
def test_odds_of_what_is_certain_are_numbers(certain: float):
    """A log-prob that rounding made 0 or more. The slope of log(p/(1-p)) is 1/(1-p), which ends at 2^20: a rejected response
    that is certain is pushed down that hard."""
    policy_B2 = tensor([-1, certain], [certain, -1]).requires_grad_()
    found = loss_of(PairLogProbs(policy_B2, policy_B2.detach(), torch.ones(2, 2)), type="orpo", beta=1.0)
    (gradient_B2,) = torch.autograd.grad(found.losses_B.sum(), policy_B2)
    assert gradient_B2[0, 1].item() == pytest.approx(2**20, rel=1e-5)
    assert found.losses_B.isfinite().all() and gradient_B2.isfinite().all()


def test_a_pair_by_hand():
    """Rewards 0.5 * (-10 + 12) = 1 and 0.5 * (-20 + 14) = -3: margin 4, loss log(1 + e^-4) = 0.01815."""
    found = loss_of(one_pair(-10, -20, -12, -14), beta=0.5)
    assert found.rewards_B2.tolist() == [[1.0, -3.0]]
    assert found.losses_B.item() == pytest.approx(0.0181499279, abs=1e-9)
    assert found.accuracies_B.item() == 1.0


def test_ipo_names_its_reduction():
    """Log-ratios 2 over 4 tokens and -6 over 3: the margin is 8, or 0.5 + 2 = 2.5 a token; 1/(2 beta) is 1."""
    pair = one_pair(-10, -20, -12, -14, tokens=(4, 3))
    assert loss_of(pair, type="ipo_sum", beta=0.5).losses_B.item() == pytest.approx((8 - 1) ** 2)
    assert loss_of(pair, type="ipo", beta=0.5).losses_B.item() == pytest.approx((2.5 - 1) ** 2)


def test_dpo_norm_by_hand():
    """The same pair: 5 * 2.5 = 12.5."""
    pair = one_pair(-10, -20, -12, -14, tokens=(4, 3))
    assert loss_of(pair, type="dpo_norm", beta=5.0).losses_B.item() == pytest.approx(math.log1p(math.exp(-12.5)))


def test_bco_pair_by_hand():
    """Rewards (1, -3) and (0, 4) have the mean 0.5: losses log(1 + e^-(c - 0.5)) + log(1 + e^(r - 0.5))."""
    logprobs = PairLogProbs(tensor([1, -3], [0, 4]), tensor([0, 0], [0, 0]), torch.ones(2, 2, dtype=torch.int64))
    expected = [log1p_exp(-0.5) + log1p_exp(-3.5), log1p_exp(0.5) + log1p_exp(3.5)]
    assert loss_of(logprobs, type="bco_pair", beta=1.0).losses_B.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_running_mean_is_that_of_all_values():
    """Means of 2 and of 3 values, then of all 5; a value that is no number is left to whoever names its pair."""
    mean = RunningMean()
    assert mean.update(tensor(1, 2)) == 1.5
    assert mean.update(tensor(4, 5, math.nan, 8)) == pytest.approx(4.0)
    assert (mean.count, mean.update(tensor())) == (5, pytest.approx(4.0))


def test_aot_matches_ranks():
    """Policy margins 3 and 1, the reference's 0 and 2: the 3 meets the 2, the 1 meets the 0, each is one ahead."""
    logprobs = PairLogProbs(tensor([3, 0], [1, 0]), tensor([0, 0], [2, 0]), torch.ones(2, 2, dtype=torch.int64))
    assert loss_of(logprobs, type="aot", beta=1.0).losses_B.tolist() == pytest.approx([log1p_exp(-1)] * 2)


def test_aot_unpaired_matches_ranks():
    """Chosen log-ratios 3 and 1, rejected 5 and 0: 3 meets 5, 1 meets 0, whatever pair they come from."""
    logprobs = PairLogProbs(tensor([3, 0], [1, 5]), tensor([0, 0], [0, 0]), torch.ones(2, 2, dtype=torch.int64))
    expected = [log1p_exp(2), log1p_exp(-1)]
    assert loss_of(logprobs, type="aot_unpaired", beta=1.0).losses_B.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_gradients_are_those_of_finite_differences(kind: LossType, ragged: Any):
    """Of the batch's loss, in float64. The shift of bco_pair is a constant, so it is held."""
    settings = Loss.model_validate(SETTINGS[kind])
    logprobs = ragged(pairs=4).logprobs(settings)
    held = batch_context(LossInputs.of(settings, logprobs), RunningMean()) if settings.keeps_state else None

    def value(policy_B2: Tensor) -> Tensor:
        moved = PairLogProbs(policy_B2, logprobs.reference_B2, logprobs.tokens_B2)
        return preference_loss(settings, moved, held).losses_B.sum()

    assert torch.autograd.gradcheck(value, logprobs.policy_B2.detach().requires_grad_())


DIVERGENCES = [{"type": "reverse_kl"}, {"type": "forward_kl"}, {"type": "js"}, {"type": "alpha", "alpha": 0.3}]
FAR = [SETTINGS[kind] for kind in PREFERENCES] + [SETTINGS["discopop"] | {"tau": 2.0}]
FAR += [
    SETTINGS[kind] | {"divergence": of} for kind in PREFERENCES if kind.traits.compares_scores for of in DIVERGENCES
]


@pytest.mark.parametrize("settings", FAR, ids=lambda s: "-".join(map(str, s.values())))
def test_far_from_the_reference_every_loss_and_gradient_is_a_number(settings: dict[str, Any]):
    """Log-ratios of -4,000 and 4,000 nats, on either side; gradients are float32 later."""
    near, far = [-10, -10], [-4010, -10]
    policy_B2 = tensor(near, far, far[::-1], near).requires_grad_()
    reference_B2 = tensor(far, near, near, far[::-1])
    found = loss_of(PairLogProbs(policy_B2, reference_B2, torch.full((4, 2), 10)), **settings)
    assert found.losses_B.isfinite().all()
    (gradient_B2,) = torch.autograd.grad(found.losses_B.sum(), policy_B2)
    assert gradient_B2.float().isfinite().all()


@pytest.mark.parametrize("kind", PREFERENCES)
def test_a_batch_in_parts_is_the_batch(kind: LossType, ragged: Any):
    """With what the batch says to them, parts in any order have the values and the gradients of the whole. What is only told
    has no gradient."""
    settings = Loss.model_validate(
        SETTINGS[kind] | ({"of": [{"type": "aot"}, {"type": "sft"}]} if kind == "mixture" else {})
    )
    logprobs = ragged(pairs=6).logprobs(settings)
    policy_B2 = logprobs.policy_B2.detach().requires_grad_()
    whole = PairLogProbs(policy_B2, logprobs.reference_B2, logprobs.tokens_B2)
    outcome = preference_loss(settings, whole)
    losses_B = outcome.losses_B
    assert not any(told.requires_grad for told in (outcome.rewards_B2, *outcome.parts.values()))
    (expected,) = torch.autograd.grad(losses_B.sum(), policy_B2)
    peers = batch_context(LossInputs.of(settings, whole), RunningMean())
    for part in (torch.tensor([4, 0, 5]), torch.tensor([2, 1]), torch.tensor([3])):
        cut = PairLogProbs(policy_B2[part], whole.reference_B2[part], whole.tokens_B2[part])
        found_B = preference_loss(settings, cut, peers.take(part)).losses_B
        torch.testing.assert_close(found_B, losses_B[part])
        expected = expected - torch.autograd.grad(found_B.sum(), policy_B2)[0]
    torch.testing.assert_close(expected, torch.zeros_like(expected))


def test_a_tie_is_not_accurate():
    assert loss_of(one_pair(-3, -4, -3, -4)).accuracies_B.item() == 0.0


@pytest.mark.parametrize("kind", ["sigmoid", "dpo_norm", "ipo", "sppo_hard"])
def test_rewards_are_dpos_whatever_the_loss_does_with_log_ratios(kind: str):
    found = loss_of(one_pair(-10, -20, -12, -14, tokens=(4, 3)), type=kind, beta=0.5)
    assert found.rewards_B2.tolist() == [[1.0, -3.0]]


def test_a_mixture_tells_its_parts():
    """ln(1 + e^-4) twice and (8 - 1)^2 half: parts are told without their weights."""
    of = [{"type": "sigmoid", "weight": 2.0}, {"type": "ipo_sum", "weight": 0.5}]
    found = loss_of(one_pair(-10, -20, -12, -14), type="mixture", beta=0.5, of=of)
    assert {name: value.item() for name, value in found.parts.items()} == pytest.approx(
        {"sigmoid": 0.0181499279, "ipo_sum": 49.0}
    )
    assert found.losses_B.item() == pytest.approx(2 * 0.0181499279 + 24.5)


def test_the_sft_term_is_the_mean_over_the_tokens_of_the_batch():
    """10 nats over 4 tokens and 2 nats over 1: 12 / 5 a token, in whatever part of the batch."""
    logprobs = PairLogProbs(tensor([-10, -1], [-2, -1]), tensor([-10, -1], [-2, -1]), torch.tensor([[4, 1], [1, 1]]))
    found = loss_of(logprobs, type="mixture", of=[{"type": "sigmoid"}, {"type": "sft"}])
    assert found.parts["sft"].mean().item() == pytest.approx(12 / 5)


def test_weights_of_pairs_leave_the_sft_term_alone():
    logprobs = PairLogProbs(tensor([-10, -1]), tensor([-10, -1]), torch.tensor([[4, 1]]), weights_B=tensor(0.25))
    found = loss_of(logprobs, type="mixture", of=[{"type": "sigmoid"}, {"type": "sft"}], weighting="wpo")
    assert found.parts["sigmoid"].item() == pytest.approx(LN2 / 4)
    assert found.parts["sft"].item() == pytest.approx(2.5)


@pytest.mark.parametrize(("alpha", "like"), [(1 - 1e-9, "reverse_kl"), (1e-9, "forward_kl")])
def test_the_alpha_divergence_lies_between_both_kls(alpha: float, like: str, ragged: Any):
    found = ragged().loss(divergence={"type": "alpha", "alpha": alpha}).losses_B
    torch.testing.assert_close(found, ragged().loss(divergence={"type": like}).losses_B, rtol=1e-6, atol=1e-6)


def test_the_reverse_kl_is_dpo(ragged: Any):
    torch.testing.assert_close(ragged().loss(divergence={"type": "reverse_kl"}).losses_B, ragged().loss().losses_B)


def test_js_by_hand():
    """Density ratios e^2 and e^-6: log(2t / (t + 1)) is log 2 - log(1 + e^-2) and log 2 - log(1 + e^6)."""
    scores = LN2 - log1p_exp(-2), LN2 - log1p_exp(6)
    found = loss_of(one_pair(-10, -20, -12, -14), beta=0.5, divergence={"type": "js"})
    assert found.losses_B.item() == pytest.approx(log1p_exp(-0.5 * (scores[0] - scores[1])), rel=1e-12)


def test_ld_alpha_counts_the_tail_in_part():
    """Of -10 nats -4 lie beyond the common length, of the reference's -12 they are -5: with alpha 1/4 the log-ratio is
    (-6 - 1) - (-7 - 1.25) = 1.25; the rejected response is the shorter one and keeps its -6. Rewards stay whole."""
    logprobs = PairLogProbs(
        tensor([-10, -20]), tensor([-12, -14]), torch.tensor([[5, 3]]), tensor([-4, 0]), tensor([-5, 0])
    )
    found = loss_of(logprobs, beta=1.0, ld_alpha=0.25)
    assert found.losses_B.item() == pytest.approx(log1p_exp(-(1.25 + 6)), rel=1e-12)
    assert found.rewards_B2.tolist() == [[2.0, -6.0]]


def test_small_margins_of_large_sums_survive():
    """Rewards of beta * 2^-10 survive although float32 rounds sums near 4000 to 2^-12."""
    policy, reference = torch.tensor([[-4000.0 + 2**-10] * 2]), tensor([-4000.0, -4000.0])
    found = loss_of(PairLogProbs(policy, reference, torch.tensor([[1, 1]])), beta=1.0)
    assert found.rewards_B2[0, 0].item() == pytest.approx(2**-10, rel=1e-9)
    assert found.losses_B.dtype == torch.float64
