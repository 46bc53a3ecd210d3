"""The 95% interval of the accuracy: worked examples, properties, and its coverage in simulations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.scoring.accuracy import accuracy, independent_pairs, wilson_interval

WON = st.lists(st.booleans(), min_size=1, max_size=30).map(np.array)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_gives_published_values(successes, trials, low, high):
    """81 of 263 is the worked example of Newcombe (1998), method 3. The others are the closed form with z2 = 3.8415."""
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("share", [0, 1])
def test_wilson_interval_contains_the_share_and_lies_in_0_to_1(share):
    """In floats the formula ends 1e-17 below 0 for 0 of 21, as much above 0 for 0 of 3, and above 1 for 11 of 11."""
    for trials in range(1, 200):
        low, high = wilson_interval(share, trials)
        assert (low, high)[share] == share and 0 < high - low < 1


@pytest.mark.parametrize(
    ("won", "prompts", "independent"),
    [
        # Half are won. Errors of the prompts 1, -1, 0: the variance is 3/2 * 2 / 6^2 = 1/12, as for four pairs, 1/4 / 3.
        ((1, 1, 0, 0, 1, 0), (0, 0, 1, 1, 2, 2), 4 * (2.570582 / 4.302653) ** 2),
        # Errors 3/4 and -3/4: the variance is 2 * 9/8 / 4^2 = 9/64, and 3/16 over it 4/3.
        ((1, 1, 1, 0), (0, 0, 0, 1), (1 + 4 / 3) * (3.182446 / 12.706205) ** 2),
        # The prompts do not differ.
        ((1, 0, 1, 0), (0, 0, 1, 1), 4 * (3.182446 / 12.706205) ** 2),
        ((1, 1, 1, 1), (0, 0, 1, 2), 3),
        ((0, 0, 0, 0), (0, 1, 1, 1), 2),
        ((1, 0, 1), (0, 0, 0), 1),
        ((1, 0, 1), (2, 1, 0), 3),
    ],
)
def test_independent_pairs_of_few_prompts_gives_numbers_by_hand(won, prompts, independent):
    """Student's quantiles come from tables, for 5 and 2, and for 3 and 1 degrees of freedom."""
    assert independent_pairs(np.array(won, bool), np.array(prompts)) == pytest.approx(independent)


@given(WON, st.integers(1, 4), st.randoms())
def test_accuracy_of_repeated_pairs_has_no_narrower_interval(won, times, random):
    """This holds in any order and for any prompt numbers. With few prompts the interval is wider."""
    order = list(range(len(won) * times))
    random.shuffle(order)
    numbers = 7 * np.arange(len(won))[::-1] - 3
    once, again = accuracy(won, numbers), accuracy(np.repeat(won, times)[order], np.repeat(numbers, times)[order])
    assert (again.pairs, again.prompts, again.share) == (len(order), len(won), once.share)
    low, high = again.interval
    assert low <= once.interval[0] + 1e-9 and high >= once.interval[1] - 1e-9
    if len(won) >= 20:
        assert again.interval == pytest.approx(once.interval, abs=0.02)


@given(WON, st.data())
def test_accuracy_of_shared_prompts_has_no_narrower_interval(won, data):
    prompts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(won), max_size=len(won))))
    distinct, shared = accuracy(won, np.arange(len(won))), accuracy(won, prompts)
    assert distinct.interval == wilson_interval(won.mean(), len(won))
    assert shared.interval[0] <= distinct.interval[0] <= shared.share <= distinct.interval[1] <= shared.interval[1]


@pytest.mark.parametrize(("prompts", "sizes"), [(100, [1, 1, 2, 4, 12, 16]), (10, [4]), (5, [4])])
def test_accuracy_interval_covers_the_true_accuracy_in_95_percent(prompts, sizes):
    """Each prompt has its own chance of a correct answer, 0.7 in the mean, and a random number of pairs."""
    random = np.random.default_rng(0)
    taken_for_independent = held = 0
    for _ in range(500):
        chances, numbers = random.beta(1.4, 0.6, prompts), np.repeat(np.arange(prompts), random.choice(sizes, prompts))
        found = accuracy(random.random(len(numbers)) < chances[numbers], numbers)
        low, high = wilson_interval(found.share, found.pairs)
        held += found.interval[0] <= 0.7 <= found.interval[1]
        taken_for_independent += low <= 0.7 <= high
    assert 0.92 < held / 500 < 0.99 and taken_for_independent / 500 < 0.88
