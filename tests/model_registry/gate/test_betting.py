"""The evidence of bets, against hand-derived numbers, as properties, and in simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_registry.gate.betting import SHARES, confidence_sequence, log_capitals, log_evidence, prompts_needed

DIFFERENCES = st.lists(st.floats(-1, 1), max_size=40)


@pytest.mark.parametrize("difference", [-1.0, -0.3, 0.0, 0.7, 1.0])
def test_log_evidence_one_difference_is_bet_with_half_of_the_capital(difference: float) -> None:
    """The shares are 1/40, 3/40, ..., 39/40. Their mean is 1/2."""
    assert log_evidence([difference]) == pytest.approx(math.log(1 + difference / 2))


def test_log_evidence_two_differences_match_the_moments_of_the_shares() -> None:
    """The mean of s^2 is 1/4 + (1 - 1/400) / 12 = 0.333125. So the capital is 1 + (0.5 - 0.2) / 2 - 0.333125 * 0.1."""
    assert log_evidence([0.5, -0.2]) == pytest.approx(math.log(1.15 - 0.0333125))


def test_log_evidence_without_differences_is_zero() -> None:
    assert log_evidence([]) == 0.0


@pytest.mark.parametrize("differences", [[1.01], [-1.01], [math.nan], [[0.5]]])
def test_log_evidence_other_values_are_refused(differences: list[float]) -> None:
    with pytest.raises(AssertionError):
        log_evidence(differences)


@given(DIFFERENCES, st.randoms(use_true_random=False))
def test_log_evidence_does_not_depend_on_the_order(differences: list[float], random) -> None:
    shuffled = random.sample(differences, len(differences))
    assert log_evidence(shuffled) == pytest.approx(log_evidence(differences), abs=1e-9)


@given(DIFFERENCES, DIFFERENCES)
def test_log_capitals_of_two_batches_add_up(first: list[float], second: list[float]) -> None:
    assert log_capitals([*first, *second]) == pytest.approx(log_capitals(first) + log_capitals(second), abs=1e-9)


@given(DIFFERENCES)
def test_log_evidence_is_at_most_the_best_capital(differences: list[float]) -> None:
    best = log_capitals(differences).max()
    assert best - math.log(len(SHARES)) - 1e-9 <= log_evidence(differences) <= best + 1e-9


def test_confidence_sequence_without_differences_is_everything() -> None:
    assert confidence_sequence([]) == (-1.0, 1.0)


def test_confidence_sequence_shrinks_around_the_mean() -> None:
    low, high = confidence_sequence([0.3, -0.1] * 100)
    wider_low, wider_high = confidence_sequence([0.3, -0.1] * 10)
    assert wider_low < low < 0.1 < high < wider_high
    assert high - low < 0.2


def test_confidence_sequence_covers_the_mean_at_all_times() -> None:
    random, runs, covered = np.random.default_rng(0), 80, 0
    for _ in range(runs):
        differences = np.where(random.random(90) < 0.3, 0.8, -0.2)  # mean 0.1
        intervals = [confidence_sequence(differences[:count]) for count in (10, 30, 90)]
        covered += all(low <= 0.1 <= high for low, high in intervals)
    assert covered / runs >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize(
    ("values", "weights"),
    [((0.25, -0.25), (0.5, 0.5)), ((0.1, -1.0), (10 / 11, 1 / 11)), ((1.0, -0.1), (1 / 11, 10 / 11))],
)
def test_capital_of_equal_policies_rarely_ever_reaches_20(
    values: tuple[float, ...], weights: tuple[float, ...]
) -> None:
    """Ville's inequality: with a mean difference of 0, at most 1/20 of all sequences reach a capital of 20 at any time."""
    runs, steps = 2000, 400
    differences_NR = np.random.default_rng(0).choice(values, p=weights, size=(steps, runs))
    capitals_SR, reached_R = np.ones((len(SHARES), runs)), np.zeros(runs, dtype=np.bool_)
    for differences_R in differences_NR:
        capitals_SR *= 1 + np.multiply.outer(SHARES, differences_R)
        reached_R |= capitals_SR.mean(axis=0) >= 20
    assert reached_R.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_prompts_needed_constant_differences_match_by_hand() -> None:
    """With 0.5 each time, the share 0.975 is best: a prompt adds log 1.4875 = 0.3971.

    After two prompts, log 100 - 2 * 0.3971 + log 20 = 6.807 is missing: 17.14 prompts.
    """
    assert prompts_needed([0.5, 0.5], math.log(100)) == 18


@pytest.mark.parametrize(
    ("differences", "expected"), [([1.0] * 20, 0), ([-0.1] * 20, None), ([0.0] * 20, None), ([0.5], None), ([], None)]
)
def test_prompts_needed_of_special_cases(differences: list[float], expected: int | None) -> None:
    assert prompts_needed(differences, math.log(100)) == expected


@pytest.mark.parametrize("gain", [0.1, 0.2, 0.3])
def test_prompts_needed_reach_the_evidence_with_power_08(gain: float) -> None:
    """Draw the predicted number from the same differences, again and again. A half of it does not suffice."""
    random, needed = np.random.default_rng(0), 8.1
    seen = np.clip((gain + random.standard_normal(100)) / 4, -1, 1)
    seen += gain / 4 - seen.mean()
    more = prompts_needed(seen, needed)
    assert more is not None and more > 0
    start = log_capitals(seen)

    def power(count: int) -> float:
        found = [start + log_capitals(random.choice(seen, count)) for _ in range(400)]
        return float(np.mean([math.log(np.exp(logs).mean()) >= needed for logs in found]))

    assert power(more) >= 0.75
    assert power(more // 2) < 0.8
