"""The 95% interval of the accuracy, against worked examples, by its properties, and by how often it holds what it should."""

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
def test_wilsons_interval(successes, trials, low, high):
    """81 of 263: the worked example of Newcombe (1998), method 3; the others from the closed form with z2 = 3.8415."""
    assert wilson_interval(successes / trials, trials) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("share", [0, 1])
def test_no_interval_ends_before_the_share_or_outside_of_0_and_1(share):
    """In floats the formula ends 1e-17 below 0 for 0 of 21, as much above it for 0 of 3, and above 1 for 11 of 11."""
    for trials in range(1, 200):
        low, high = wilson_interval(share, trials)
        assert (low, high)[share] == share and 0 < high - low < 1


@pytest.mark.parametrize(
    ("won", "prompts", "independent"),
    [
        # Half are won. Errors of the prompts 1, -1, 0: the variance is 3/2 * 2 / 6^2 = 1/12, that of four pairs 1/4 / 3.
        ((1, 1, 0, 0, 1, 0), (0, 0, 1, 1, 2, 2), 4 * (2.570582 / 4.302653) ** 2),
        # Errors 3/4 and -3/4: the variance is 2 * 9/8 / 4^2 = 9/64, and 3/16 over it 4/3.
        ((1, 1, 1, 0), (0, 0, 0, 1), (1 + 4 / 3) * (3.182446 / 12.706205) ** 2),
        # The prompts do not differ at all.
        ((1, 0, 1, 0), (0, 0, 1, 1), 4 * (3.182446 / 12.706205) ** 2),
        ((1, 1, 1, 1), (0, 0, 1, 2), 3),
        ((0, 0, 0, 0), (0, 1, 1, 1), 2),
        ((1, 0, 1), (0, 0, 0), 1),
        ((1, 0, 1), (2, 1, 0), 3),
    ],
)
def test_as_how_many_pairs_those_of_few_prompts_count(won, prompts, independent):
    """The quantiles are those of the tables of Student's distribution, for 5 and 2, and for 3 and 1 degrees of freedom."""
    assert independent_pairs(np.array(won, bool), np.array(prompts)) == pytest.approx(independent)


@given(WON, st.integers(1, 4), st.randoms())
def test_a_pair_that_is_there_several_times_does_not_count_more(won, times, random):
    """In any order, under any numbers for the prompts. It counts once, and less where few prompts say how alike pairs are."""
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
def test_pairs_of_few_prompts_never_count_as_more_than_there_are(won, data):
    prompts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(won), max_size=len(won))))
    alone, found = accuracy(won, np.arange(len(won))), accuracy(won, prompts)
    assert alone.interval == wilson_interval(won.mean(), len(won))
    assert found.interval[0] <= alone.interval[0] <= found.share <= alone.interval[1] <= found.interval[1]


@pytest.mark.parametrize(("prompts", "sizes"), [(100, [1, 1, 2, 4, 12, 16]), (10, [4]), (5, [4])])
def test_it_holds_the_true_accuracy_as_often_as_it_says(prompts, sizes):
    """Each prompt, with so many pairs, is answered rightly with a chance of its own, 0.7 in the mean."""
    random = np.random.default_rng(0)
    taken_for_independent = held = 0
    for _ in range(500):
        chances, numbers = random.beta(1.4, 0.6, prompts), np.repeat(np.arange(prompts), random.choice(sizes, prompts))
        found = accuracy(random.random(len(numbers)) < chances[numbers], numbers)
        low, high = wilson_interval(found.share, found.pairs)
        held += found.interval[0] <= 0.7 <= found.interval[1]
        taken_for_independent += low <= 0.7 <= high
    assert 0.92 < held / 500 < 0.99 and taken_for_independent / 500 < 0.88
