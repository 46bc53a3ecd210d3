"""Votes, against their expectation and numbers by hand."""

import math
import statistics

import numpy as np
import pytest

from training.contract.protocol.votes import VOTES, bias_bound, nats_of_a_figure, vote


def test_figures_of_many_keys_have_the_mean_and_the_spread_of_votes() -> None:
    """A vote answers 1 with probability 0.35, so a figure has the variance 0.35 * 0.65 / 100."""
    scores = [1.0, 0.5, 0.25, 0.0, 0.0]
    figures = [vote(scores, "accuracy", str(key)) for key in range(4000)]
    spread = math.sqrt(0.35 * 0.65 / VOTES)
    assert statistics.fmean(figures) == pytest.approx(0.35, abs=4 * spread / math.sqrt(len(figures)))
    assert statistics.stdev(figures) == pytest.approx(spread, rel=0.05)


def test_same_key_and_figure_give_the_same_votes() -> None:
    scores = np.linspace(0, 1, 50)
    drawn = {(name, key): vote(scores, name, key) for name in ("accuracy", "win") for key in map(str, range(10))}
    assert all(vote(scores, *of) == value for of, value in drawn.items())
    assert len(set(drawn.values())) > 5
    assert [drawn["accuracy", str(key)] for key in range(10)] != [drawn["win", str(key)] for key in range(10)]


@pytest.mark.parametrize(("score", "expected"), [(0.0, 0.0), (1.0, 1.0), (math.nan, 0.0)])
def test_certain_scores_give_certain_figures(score: float, expected: float) -> None:
    assert {vote([score] * 7, "accuracy", str(key)) for key in range(20)} == {expected}


@pytest.mark.parametrize("scores", [[], [1.5], [-0.1], [[0.0]]])
def test_scores_outside_their_range_are_refused(scores: list[float]) -> None:
    with pytest.raises(AssertionError):
        vote(scores, "accuracy", "key")


def test_nats_and_bound_by_hand() -> None:
    """100 votes of 4 / 800 nats are half a nat; sqrt(0.5 / 1600) = 1 / sqrt(3200)."""
    assert nats_of_a_figure(800) == 0.5
    assert bias_bound(0.5, 800) == pytest.approx(1 / math.sqrt(3200), rel=1e-12)
    assert bias_bound(math.inf, 800) == math.inf


def test_revealed_nats_of_a_small_set_stay_below_the_bound() -> None:
    """The exact mutual information of one vote and n fair bits, by enumeration, is at most 4 / n."""
    for pairs in (1, 2, 5, 10):
        ones = np.arange(pairs + 1)
        weights = np.array([math.comb(pairs, k) for k in ones]) / 2**pairs
        share = ones / pairs
        entropies = [sum(-p * math.log(p) for p in (s, 1 - s) if p) for s in share]
        assert math.log(2) - float(weights @ np.array(entropies)) <= 4 / pairs
