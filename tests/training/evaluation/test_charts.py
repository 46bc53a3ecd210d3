"""The charts of the report: bars, points and lines against numbers by hand and by numpy."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.training.evaluation.pages import page_of
from training.evaluation.charts import HEIGHT, WIDTH, histogram, length_scatter


def test_histogram_shows_counts_as_bars():
    """It has 41 bins of width 1. A bar fills nine tenths of its bin."""
    found = histogram([-10.0, -10.0, 0.5, 30.0])
    expected = [(0, 0, HEIGHT, False), (10, HEIGHT / 2, HEIGHT / 2, True), (40, HEIGHT / 2, HEIGHT / 2, True)]
    step = WIDTH / 41
    assert [(bar.left, bar.top, bar.width, bar.height, bar.is_positive) for bar in found.bars] == [
        (round(at * step, 2), top, round(0.9 * step, 2), high, side) for at, top, high, side in expected
    ]
    assert [bar.title for bar in found.bars] == [
        "-10.0000 to -9.0000: 2 pairs",
        "0.0000 to 1.0000: 1 pair",
        "30.0000 to 31.0000: 1 pair",
    ]
    assert found.most == 2 and found.zero == round(10 * step, 2)
    assert [tick.text for tick in found.ticks] == ["-10", "0", "31"]


@pytest.mark.parametrize(("margins", "ticks"), [([1.0, 2.0], ["0", "2.05"]), ([-3.0], ["-3", "0"])])
def test_histogram_on_one_side_of_zero_has_no_tick_over_another(margins, ticks):
    """The last bin of the first begins at 2. The second has one empty bin above zero."""
    assert [tick.text for tick in histogram(margins).ticks] == ticks


@settings(deadline=None)  # a page takes 0.3 s on a busy machine
@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=5))
@example([-0.9])  # in floats, 40 * (0.9 / 40) is 1e-16 less
@example(list(np.linspace(-1, 1, 500)))
def test_histogram_shows_every_pair_on_its_side_of_zero(margins):
    bars = re.findall(r'class="(plus|minus)"><title>[^<]*?: (\d+) pairs?<', page_of(margins=margins))
    assert sum(int(count) for _, count in bars) == len(margins)
    assert sum(int(count) for side, count in bars if side == "minus") == sum(margin < 0 for margin in margins)


def test_scatter_has_zero_and_both_ends_on_its_axes():
    """Differences from -10 to 30, margins from 0 to 2: zero is at a quarter of the width and at the bottom."""
    found = length_scatter([-10, 0, 30], [0.0, 1.0, 2.0], 3)
    places = [(point.x, point.y, point.is_positive) for point in found.points]
    assert places == [(0, HEIGHT, False), (WIDTH / 4, HEIGHT / 2, True), (WIDTH, 0, True)]
    assert found.points[0].title == "-10 tokens, margin +0.0000" and found.zero == (WIDTH / 4, HEIGHT)
    assert [(tick.at, tick.text) for tick in found.x_ticks] == [(0, "-10"), (WIDTH / 4, "0"), (WIDTH, "30")]
    assert [(tick.at, tick.text) for tick in found.y_ticks] == [(0, "2"), (HEIGHT, "0")]


@given(
    st.lists(
        st.tuples(st.integers(-500, 500), st.integers(-9000, 9000).map(lambda n: n / 1000)), min_size=2, max_size=30
    )
)
def test_scatter_has_the_correlation_and_the_trend_of_numpy(values):
    differences, margins = map(list, zip(*values, strict=True))
    found = length_scatter(differences, margins, len(values))
    assert all(0 <= point.x <= WIDTH and 0 <= point.y <= HEIGHT for point in found.points)
    if len(set(differences)) == 1 or len(set(margins)) == 1:
        assert found.correlation is None and found.trend is None and "no correlation" in found.sentence
        return
    assert found.correlation == pytest.approx(np.corrcoef(differences, margins)[0, 1], abs=1e-6)
    slope, start = np.polyfit(differences, margins, 1)
    low, high = min(0, *margins), max(0, *margins)
    ends = [HEIGHT * (high - (start + slope * x)) / (high - low) for x in (min(differences), max(differences))]
    assert found.trend is not None
    assert [found.trend[1], found.trend[3]] == pytest.approx(ends, abs=0.1)


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        (range(100), "+1.00 over 100 pairs: the longer the chosen response, the greater the margin."),
        (range(100, 0, -1), "-1.00 over 100 pairs: the longer the chosen response, the smaller the margin."),
        ([0, 1] * 50, "over 100 pairs: no more than chance, which stays within 0.20 in 95% of such samples."),
    ],
)
def test_scatter_tells_the_correlation_in_words(differences, sentence):
    assert length_scatter(list(differences), list(np.arange(100.0)), 100).sentence.endswith(sentence)


def test_scatter_counts_prompts_as_independent_pairs():
    """Four prompts: the standard error of r is 1/2."""
    assert length_scatter(list(range(100)), list(np.arange(100.0)), 4).chance == pytest.approx(0.98)


def test_scatter_of_many_pairs_draws_some_and_says_so():
    count = 2500
    differences, margins = list(range(count)), list(np.sin(np.arange(count)))
    found = length_scatter(differences, margins, count)
    assert len(found.points) == 1000 and found.pairs == count
    assert found.correlation == pytest.approx(np.corrcoef(differences, margins)[0, 1])
    page = page_of(margins=margins)
    assert page.count("<circle ") == 1000 and "1,000 of the pairs are drawn." in page and "are drawn" not in page_of()
