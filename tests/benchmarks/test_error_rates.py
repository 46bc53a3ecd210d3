"""The promised rates of the gate, in fewer simulated years than `benchmarks.gate.simulation` has."""

import math

import pytest

from benchmarks.gate.capital import ALPHA
from benchmarks.gate.policies import Scenario
from benchmarks.gate.power import Metric, needed_gains, power
from benchmarks.gate.years import ANYTIME, ANYTIME_ARRIVING, LADDER, simulate

YEARS = 400
MOST = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / YEARS)


@pytest.mark.parametrize("scenario", [scenario for scenario in Scenario if scenario != Scenario.TUNED])
def test_anytime_has_few_false_promotions(scenario: Scenario) -> None:
    assert simulate(scenario, 100, YEARS)[ANYTIME].discovery_rate.mean <= MOST


def test_candidates_tuned_on_held_out_pairs_pass_without_held_out_evidence_rarely() -> None:
    rates = simulate(Scenario.TUNED, 100, YEARS)
    assert rates[ANYTIME_ARRIVING].discovery_rate.mean <= MOST
    assert rates[LADDER].discovery_rate.mean > 0.5


@pytest.mark.parametrize("metric", Metric)
def test_the_tenth_hypothesis_has_power_08(metric: Metric) -> None:
    assert power(metric, 10, 2.8, weeks=4, runs=1000) >= 0.8


def test_equal_candidates_are_promoted_as_rarely_as_the_level() -> None:
    assert power(Metric.LOSS, 1, 0.0, weeks=10, runs=1000) <= 0.03 + 3 * math.sqrt(0.03 * 0.97 / 1000)


def test_needed_gains_pass_the_level() -> None:
    """The share of 0.8 needs more than 0.5, and the tenth hypothesis more than the first: about four and six errors."""
    (first_half, first), (tenth_half, tenth) = (needed_gains(number, (0.5, 0.8), 200)[0] for number in (1, 10))
    assert first_half < first < tenth and first_half < tenth_half < tenth
    assert (first, tenth) == pytest.approx((4.2, 5.8), abs=0.3)
