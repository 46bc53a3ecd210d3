"""Losses, compared with formulas in plain float64, hand-derived numbers and numerical gradients."""

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
# All types, with valid settings.
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


def test_losses_has_a_function_for_every_type():
    assert set(LOSSES) | {LossType.MIXTURE} == set(LossType)


def test_bounded_exp_continues_along_its_tangent():
    """e^x up to x = 30, then e^30 (1 + x - 30) with the slope e^30, so that extreme pairs still get a gradient."""
    exponents = tensor(-2.0, 29.0, 31.0, 40.0).requires_grad_()
    found = bounded_exp(exponents)
    found.sum().backward()
    assert found.tolist() == pytest.approx([math.exp(-2), math.exp(29), 2 * math.exp(30), 11 * math.exp(30)])
    assert exponents.grad.tolist() == pytest.approx([math.exp(-2), math.exp(29), math.exp(30), math.exp(30)])


@given(LOGPROBS, LOGPROBS, LOGPROBS, LOGPROBS, st.floats(0.01, 5), st.floats(0, 0.49))
def test_sigmoid_equals_the_formula_of_the_paper(
    chosen: float, rejected: float, ref_chosen: float, ref_rejected: float, beta: float, smoothing: float
):
    """-log sigmoid(m) = log(1 + exp(-m)), with m = beta ((chosen - ref) - (rejected - ref)), computed with `math`. With label
    smoothing e: the conservative DPO of Mitchell (2023), (1-e) log(1 + exp(-m)) + e log(1 + exp(m))."""
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    expected = (1 - smoothing) * log1p_exp(-margin) + smoothing * log1p_exp(margin)
    found = loss_of(one_pair(chosen, rejected, ref_chosen, ref_rejected), beta=beta, label_smoothing=smoothing)
    assert found.losses_B.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.margins_B.item() == pytest.approx(margin, rel=1e-9, abs=1e-9)


@given(st.floats(0.01, 0.49))
def test_robust_is_unbiased_for_swapped_labels(smoothing: float):
    """If labels are swapped with probability e, the mean of the robust loss is the loss of clean labels."""
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
def test_loss_at_zero_margin_is_a_constant(kind: str, ragged: Any):
    """By hand: s(0) = 1/2; exo_pair is ln(1/2) - (ln e + ln(1-e)) / 2. Pairs and lengths do not matter."""
    pairs = ragged(spread=0.0)
    assert pairs.loss(**SETTINGS[kind]).losses_B.mean().item() == pytest.approx(AT_ZERO_MARGIN[kind], rel=1e-12)


def test_simpo_by_hand():
    """Without a reference model the loss depends on the data also at zero margin: -4/2 and -9/3 nats per token give
    log(1 + exp(-(2 * (-2 + 3) - 0.5))) = log(1 + exp(-1.5))."""
    pair = one_pair(-4, -9, -4, -9, tokens=(2, 3))
    found = loss_of(pair, type="simpo", beta=2, gamma=0.5)
    assert found.losses_B.item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-12)
    assert found.rewards_B2.tolist() == [[-4.0, -6.0]]


def test_cpo_by_hand():
    """Sums without regard to lengths: log(1 + exp(-0.5 * (-4 + 9))). Rewards are beta times the log-probs."""
    found = loss_of(one_pair(-4, -9, -1, -1, tokens=(2, 3)), type="cpo", beta=0.5)
    assert found.losses_B.item() == pytest.approx(math.log1p(math.exp(-2.5)), rel=1e-12)
    assert found.rewards_B2.tolist() == [[-2.0, -4.5]]


def test_orpo_by_hand():
    """Tokens with probabilities 3/4 and 1/5 have odds of 3 and 1/4: s(log 12) is 12/13."""
    pair = one_pair(2 * math.log(3 / 4), 3 * math.log(1 / 5), -1, -1, tokens=(2, 3))
    found = loss_of(pair, type="orpo", beta=0.1)
    assert found.losses_B.item() == pytest.approx(-0.1 * math.log(12 / 13), rel=1e-12)
    assert found.rewards_B2[0].tolist() == pytest.approx([0.1 * math.log(3 / 4), 0.1 * math.log(1 / 5)])


@pytest.mark.parametrize("certain", [0.0, 1e-7])
def test_orpo_of_a_certain_response_is_finite(certain: float):
    """Rounding may give log-probs of 0 or more. The slope of log(p/(1-p)), 1/(1-p), is bounded by 2^20."""
    policy_B2 = tensor([-1, certain], [certain, -1]).requires_grad_()
    found = loss_of(PairLogProbs(policy_B2, policy_B2.detach(), torch.ones(2, 2)), type="orpo", beta=1.0)
    (gradient_B2,) = torch.autograd.grad(found.losses_B.sum(), policy_B2)
    assert gradient_B2[0, 1].item() == pytest.approx(2**20, rel=1e-5)
    assert found.losses_B.isfinite().all() and gradient_B2.isfinite().all()


def test_sigmoid_by_hand():
    """Rewards 0.5 * (-10 + 12) = 1 and 0.5 * (-20 + 14) = -3: margin 4, loss log(1 + e^-4) = 0.01815."""
    found = loss_of(one_pair(-10, -20, -12, -14), beta=0.5)
    assert found.rewards_B2.tolist() == [[1.0, -3.0]]
    assert found.losses_B.item() == pytest.approx(0.0181499279, abs=1e-9)
    assert found.accuracies_B.item() == 1.0


def test_ipo_and_ipo_sum_by_hand():
    """Log-ratios 2 over 4 tokens and -6 over 3: the margin is 8, or 0.5 + 2 = 2.5 per token; 1/(2 beta) is 1."""
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


def test_running_mean_is_the_mean_of_all_finite_values():
    """The mean of 2 values, then of all 5. NaN is skipped."""
    mean = RunningMean()
    assert mean.update(tensor(1, 2)) == 1.5
    assert mean.update(tensor(4, 5, math.nan, 8)) == pytest.approx(4.0)
    assert (mean.count, mean.update(tensor())) == (5, pytest.approx(4.0))


def test_aot_compares_margins_of_equal_rank():
    """Policy margins 3 and 1, reference margins 0 and 2: 3 is compared with 2 and 1 with 0."""
    logprobs = PairLogProbs(tensor([3, 0], [1, 0]), tensor([0, 0], [2, 0]), torch.ones(2, 2, dtype=torch.int64))
    assert loss_of(logprobs, type="aot", beta=1.0).losses_B.tolist() == pytest.approx([log1p_exp(-1)] * 2)


def test_aot_unpaired_compares_log_ratios_of_equal_rank():
    """Chosen log-ratios 3 and 1, rejected 5 and 0: 3 is compared with 5 and 1 with 0."""
    logprobs = PairLogProbs(tensor([3, 0], [1, 5]), tensor([0, 0], [0, 0]), torch.ones(2, 2, dtype=torch.int64))
    expected = [log1p_exp(2), log1p_exp(-1)]
    assert loss_of(logprobs, type="aot_unpaired", beta=1.0).losses_B.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_gradients_equal_finite_differences(kind: LossType, ragged: Any):
    """For the batch's loss, in float64. The shift of bco_pair is a constant, so its context is fixed."""
    settings = Loss.model_validate(SETTINGS[kind])
    logprobs = ragged(pairs=4).logprobs(settings)
    fixed = batch_context(LossInputs.of(settings, logprobs), RunningMean()) if settings.keeps_state else None

    def value(policy_B2: Tensor) -> Tensor:
        moved = PairLogProbs(policy_B2, logprobs.reference_B2, logprobs.tokens_B2)
        return preference_loss(settings, moved, fixed).losses_B.sum()

    assert torch.autograd.gradcheck(value, logprobs.policy_B2.detach().requires_grad_())


DIVERGENCES = [{"type": "reverse_kl"}, {"type": "forward_kl"}, {"type": "js"}, {"type": "alpha", "alpha": 0.3}]
FAR = [SETTINGS[kind] for kind in PREFERENCES] + [SETTINGS["discopop"] | {"tau": 2.0}]
FAR += [
    SETTINGS[kind] | {"divergence": of} for kind in PREFERENCES if kind.traits.compares_scores for of in DIVERGENCES
]


@pytest.mark.parametrize("settings", FAR, ids=lambda s: "-".join(map(str, s.values())))
def test_losses_and_gradients_are_finite_for_extreme_log_ratios(settings: dict[str, Any]):
    """Log-ratios of -4,000 and 4,000 nats, for either response. Gradients must fit into float32."""
    near, far = [-10, -10], [-4010, -10]
    policy_B2 = tensor(near, far, far[::-1], near).requires_grad_()
    reference_B2 = tensor(far, near, near, far[::-1])
    found = loss_of(PairLogProbs(policy_B2, reference_B2, torch.full((4, 2), 10)), **settings)
    assert found.losses_B.isfinite().all()
    (gradient_B2,) = torch.autograd.grad(found.losses_B.sum(), policy_B2)
    assert gradient_B2.float().isfinite().all()


@pytest.mark.parametrize("kind", PREFERENCES)
def test_losses_of_parts_equal_the_loss_of_the_batch(kind: LossType, ragged: Any):
    """With the batch's context, parts in any order give the values and gradients of the batch. Metrics lack gradients."""
    settings = Loss.model_validate(
        SETTINGS[kind] | ({"of": [{"type": "aot"}, {"type": "sft"}]} if kind == "mixture" else {})
    )
    logprobs = ragged(pairs=6).logprobs(settings)
    policy_B2 = logprobs.policy_B2.detach().requires_grad_()
    batch = PairLogProbs(policy_B2, logprobs.reference_B2, logprobs.tokens_B2)
    outcome = preference_loss(settings, batch)
    losses_B = outcome.losses_B
    assert not any(metric.requires_grad for metric in (outcome.rewards_B2, *outcome.parts.values()))
    (expected,) = torch.autograd.grad(losses_B.sum(), policy_B2)
    context = batch_context(LossInputs.of(settings, batch), RunningMean())
    for part in (torch.tensor([4, 0, 5]), torch.tensor([2, 1]), torch.tensor([3])):
        micro_batch = PairLogProbs(policy_B2[part], batch.reference_B2[part], batch.tokens_B2[part])
        found_B = preference_loss(settings, micro_batch, context.take(part)).losses_B
        torch.testing.assert_close(found_B, losses_B[part])
        expected = expected - torch.autograd.grad(found_B.sum(), policy_B2)[0]
    torch.testing.assert_close(expected, torch.zeros_like(expected))


def test_a_tie_is_not_accurate():
    assert loss_of(one_pair(-3, -4, -3, -4)).accuracies_B.item() == 0.0


@pytest.mark.parametrize("kind", ["sigmoid", "dpo_norm", "ipo", "sppo_hard"])
def test_rewards_are_beta_times_log_ratios_for_every_loss(kind: str):
    found = loss_of(one_pair(-10, -20, -12, -14, tokens=(4, 3)), type=kind, beta=0.5)
    assert found.rewards_B2.tolist() == [[1.0, -3.0]]


def test_a_mixture_reports_unweighted_parts():
    """ln(1 + e^-4) with weight 2 and (8 - 1)^2 with weight 1/2."""
    of = [{"type": "sigmoid", "weight": 2.0}, {"type": "ipo_sum", "weight": 0.5}]
    found = loss_of(one_pair(-10, -20, -12, -14), type="mixture", beta=0.5, of=of)
    assert {name: value.item() for name, value in found.parts.items()} == pytest.approx(
        {"sigmoid": 0.0181499279, "ipo_sum": 49.0}
    )
    assert found.losses_B.item() == pytest.approx(2 * 0.0181499279 + 24.5)


def test_sft_is_the_mean_over_the_chosen_tokens_of_the_batch():
    """10 nats over 4 tokens and 2 nats over 1: 12 / 5 per token."""
    logprobs = PairLogProbs(tensor([-10, -1], [-2, -1]), tensor([-10, -1], [-2, -1]), torch.tensor([[4, 1], [1, 1]]))
    found = loss_of(logprobs, type="mixture", of=[{"type": "sigmoid"}, {"type": "sft"}])
    assert found.parts["sft"].mean().item() == pytest.approx(12 / 5)


def test_weights_of_pairs_do_not_change_the_sft_term():
    logprobs = PairLogProbs(tensor([-10, -1]), tensor([-10, -1]), torch.tensor([[4, 1]]), weights_B=tensor(0.25))
    found = loss_of(logprobs, type="mixture", of=[{"type": "sigmoid"}, {"type": "sft"}], weighting="wpo")
    assert found.parts["sigmoid"].item() == pytest.approx(LN2 / 4)
    assert found.parts["sft"].item() == pytest.approx(2.5)


@pytest.mark.parametrize(("alpha", "limit"), [(1 - 1e-9, "reverse_kl"), (1e-9, "forward_kl")])
def test_alpha_divergence_has_both_kls_as_limits(alpha: float, limit: str, ragged: Any):
    found = ragged().loss(divergence={"type": "alpha", "alpha": alpha}).losses_B
    torch.testing.assert_close(found, ragged().loss(divergence={"type": limit}).losses_B, rtol=1e-6, atol=1e-6)


def test_reverse_kl_equals_dpo(ragged: Any):
    torch.testing.assert_close(ragged().loss(divergence={"type": "reverse_kl"}).losses_B, ragged().loss().losses_B)


def test_js_by_hand():
    """Density ratios e^2 and e^-6: log(2t / (t + 1)) is log 2 - log(1 + e^-2) and log 2 - log(1 + e^6)."""
    scores = LN2 - log1p_exp(-2), LN2 - log1p_exp(6)
    found = loss_of(one_pair(-10, -20, -12, -14), beta=0.5, divergence={"type": "js"})
    assert found.losses_B.item() == pytest.approx(log1p_exp(-0.5 * (scores[0] - scores[1])), rel=1e-12)


def test_ld_alpha_weights_the_tail():
    """The tail has -4 of the policy's -10 nats and -5 of the reference's -12. With alpha 1/4 the log-ratio is
    (-6 - 1) - (-7 - 1.25) = 1.25. The shorter rejected response keeps its -6. Rewards use full sums."""
    logprobs = PairLogProbs(
        tensor([-10, -20]), tensor([-12, -14]), torch.tensor([[5, 3]]), tensor([-4, 0]), tensor([-5, 0])
    )
    found = loss_of(logprobs, beta=1.0, ld_alpha=0.25)
    assert found.losses_B.item() == pytest.approx(log1p_exp(-(1.25 + 6)), rel=1e-12)
    assert found.rewards_B2.tolist() == [[2.0, -6.0]]


def test_small_margins_of_large_sums_are_exact():
    """Rewards of beta * 2^-10; float32 would round sums near 4000 to 2^-12."""
    policy, reference = torch.tensor([[-4000.0 + 2**-10] * 2]), tensor([-4000.0, -4000.0])
    found = loss_of(PairLogProbs(policy, reference, torch.tensor([[1, 1]])), beta=1.0)
    assert found.rewards_B2[0, 0].item() == pytest.approx(2**-10, rel=1e-9)
    assert found.losses_B.dtype == torch.float64
