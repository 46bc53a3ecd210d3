"""The levels of e-LOND, against hand-derived numbers and as properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_registry.gate.e_lond import gamma, level


def test_gamma_first_parts_match_by_hand() -> None:
    """6 / pi^2 = 0.607927; a fourth, a ninth, a hundredth of it follow."""
    assert [gamma(number) for number in (1, 2, 3, 10)] == pytest.approx(
        [0.607927, 0.151982, 0.067547, 0.00607927], rel=1e-5
    )


def test_gammas_sum_to_one() -> None:
    """The parts after number n sum to less than 6 / (pi^2 n), and to more than 6 / (pi^2 (n + 1))."""
    count = 10_000
    total = math.fsum(gamma(number) for number in range(1, count + 1))
    assert 6 / math.pi**2 / (count + 1) < 1 - total < 6 / math.pi**2 / count


def test_gamma_hypotheses_are_counted_from_one() -> None:
    with pytest.raises(AssertionError, match="counted from 1"):
        gamma(0)


def test_level_matches_by_hand() -> None:
    """0.05 * 0.607927 = 0.0303964: evidence of 32.9. After a promotion, the second needs 0.05 * 0.151982 * 2 = 0.0151982."""
    assert level(0.05, 1, 0) == pytest.approx(0.0303964, rel=1e-5)
    assert level(0.05, 2, 1) == pytest.approx(0.0151982, rel=1e-5)


def test_level_is_at_most_one() -> None:
    assert level(0.5, 1, 10) == 1.0


@given(st.floats(0.001, 0.5), st.integers(1, 500), st.integers(0, 500))
def test_level_falls_with_hypotheses_and_rises_with_promotions(alpha: float, number: int, promotions: int) -> None:
    assert (
        level(alpha, number + 1, promotions) <= level(alpha, number, promotions) <= level(alpha, number, promotions + 1)
    )
