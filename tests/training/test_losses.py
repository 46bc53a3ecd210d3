"""Losses against formulas in plain float64 and hand-derived numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.contract.recipe import Loss
from training.losses import LOSSES, PairLogProbs, preference_loss

LOGPROBS = st.floats(-500, 0)


def one_pair(*values: float) -> PairLogProbs:
    return PairLogProbs(*(torch.tensor([value], dtype=torch.float64) for value in values))


def log1p_exp(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@given(LOGPROBS, LOGPROBS, LOGPROBS, LOGPROBS, st.floats(0.01, 5), st.floats(0, 0.49))
def test_sigmoid_is_the_formula_of_the_paper(
    chosen: float, rejected: float, ref_chosen: float, ref_rejected: float, beta: float, smoothing: float
):
    """-log sigmoid(m) = log(1 + exp(-m)), with m = beta ((chosen - ref) - (rejected - ref)), by `math` alone."""
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    expected = (1 - smoothing) * log1p_exp(-margin) + smoothing * log1p_exp(margin)
    settings = Loss(beta=beta, label_smoothing=smoothing)
    found = preference_loss(settings, one_pair(chosen, rejected, ref_chosen, ref_rejected))
    assert float(found.losses_B) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert float(found.margins_B) == pytest.approx(margin, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("kind", LOSSES)
def test_ln_2_at_zero_margin(kind: str, smoothing: float):
    settings = Loss(type=kind, beta=0.3, label_smoothing=smoothing)
    assert LOSSES[kind].value_at_zero_margin(settings) == pytest.approx(math.log(2), abs=1e-15)
    policy_is_reference = one_pair(-12.5, -80.25, -12.5, -80.25)
    assert float(preference_loss(settings, policy_is_reference).losses_B) == pytest.approx(math.log(2), abs=1e-15)


def test_a_pair_by_hand():
    """Rewards 0.5 * (-10 + 12) = 1 and 0.5 * (-20 + 14) = -3: margin 4, loss log(1 + e^-4) = 0.01815."""
    found = preference_loss(Loss(beta=0.5), one_pair(-10, -20, -12, -14))
    assert (float(found.rewards_chosen_B), float(found.rewards_rejected_B)) == (1.0, -3.0)
    assert float(found.losses_B) == pytest.approx(0.0181499279, abs=1e-9)
    assert float(found.accuracies_B) == 1.0


def test_a_tie_is_not_accurate():
    assert float(preference_loss(Loss(), one_pair(-3, -4, -3, -4)).accuracies_B) == 0.0


def test_gradient_is_minus_beta_times_sigmoid_of_minus_margin():
    """d loss / d policy_chosen = -beta sigmoid(-m), and the opposite for rejected: at m = 0 and beta 0.1, -0.05."""
    policy = torch.tensor([[-5.0], [-7.0]], dtype=torch.float64, requires_grad=True)
    constant = torch.tensor([[-5.0], [-7.0]], dtype=torch.float64)
    preference_loss(Loss(beta=0.1), PairLogProbs(policy[0], policy[1], constant[0], constant[1])).losses_B.backward()
    assert policy.grad is not None
    assert policy.grad.flatten().tolist() == pytest.approx([-0.05, 0.05])


def test_float32_policy_against_float64_reference_keeps_small_margins():
    """Rewards of beta * 2^-10 survive although float32 rounds sums near 4000 to 2^-12."""
    policy = torch.tensor([-4000.0 + 2**-10])
    reference = torch.tensor([-4000.0], dtype=torch.float64)
    found = preference_loss(Loss(beta=1.0), PairLogProbs(policy, policy, reference, reference))
    assert float(found.rewards_chosen_B) == pytest.approx(2**-10, rel=1e-9)
    assert found.losses_B.dtype == torch.float64
