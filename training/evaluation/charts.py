"""Charts of the report as plain geometry: the histogram of the margins, and the margins by difference of length.

The page draws them as inline SVG. All positions are in units of the drawing, with y downwards. The drawing is narrow: a phone
shrinks it, and its texts must stay readable.

Legend: V held-out pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 460, 220
_BINS = 40
_LARGEST_SCATTER = 1000  # more points make the page large, and show no more
_BETWEEN_TICKS = 56  # units that a number takes on the horizontal axis
_BETWEEN_LINES = 18
_Z95 = 1.96

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Bar:
    left: float
    top: float
    width: float
    height: float
    is_positive: bool
    title: str


@dataclass(frozen=True)
class Histogram:
    """Bars, the place of zero and the ticks. `most` is the count of the tallest bar."""

    bars: Sequence[Bar]
    zero: float
    ticks: Sequence[Tick]
    most: int


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    is_positive: bool
    title: str


@dataclass(frozen=True)
class LengthScatter:
    """Margins against chosen minus rejected tokens. `pairs` are all pairs, of which at most 1,000 are points.

    `zero` is the place of the origin. `trend` holds both ends of the least-squares line. `trend` and `correlation` (Pearson's)
    are None if all margins or all differences are equal. `chance`: 95% of samples without a relation have a smaller absolute
    correlation.
    """

    points: Sequence[Point]
    pairs: int
    zero: tuple[float, float]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    trend: tuple[float, float, float, float] | None
    correlation: float | None
    chance: float

    @property
    def sentence(self) -> str:
        """The correlation in words."""
        if self.correlation is None:
            return "There is no correlation to compute, because all margins or all differences of length are equal."
        if abs(self.correlation) < self.chance:
            meaning = f"no more than chance, which stays within {self.chance:.2f} in 95% of such samples"
        else:
            meaning = (
                f"the longer the chosen response, the {'greater' if self.correlation > 0 else 'smaller'} the margin"
            )
        return f"The correlation (Pearson's r) is {self.correlation:+.2f} over {self.pairs:,} pairs: {meaning}."


def histogram(margins: Sequence[float]) -> Histogram:
    """Return bins of equal width with an edge at zero, so that no bar mixes positive and negative margins."""
    values = np.asarray(margins, dtype=np.float64)
    width = max(float(np.ptp(np.append(values, 0.0))) / _BINS, 1e-9)
    # Count by bin number, not by bin edges: rounding could put a value outside all edges.
    numbers = np.floor(values / width).astype(int)
    first, last = min(int(numbers.min()), 0), max(int(numbers.max()), 0) + 1
    counts = np.bincount(numbers - first, minlength=last - first)
    most, step = int(counts.max()), WIDTH / (last - first)
    bars = [
        Bar(
            left=round((number - first) * step, 2),
            top=round(HEIGHT * (1 - count / most), 2),
            width=round(step * 0.9, 2),
            height=round(HEIGHT * count / most, 2),
            is_positive=number >= 0,
            title=f"{number * width:,.4f} to {(number + 1) * width:,.4f}: {count} pair{'s' if count > 1 else ''}",
        )
        for number, count in enumerate(counts.tolist(), first)
        if count
    ]
    zero = round(-first * step, 2)
    ticks = _ticks((0, first * width), (zero, 0.0), (WIDTH, last * width), apart=_BETWEEN_TICKS)
    return Histogram(bars, zero, ticks, most)


def length_scatter(differences: Sequence[int], margins: Sequence[float], prompts: int) -> LengthScatter:
    """Return the margins of V pairs against their differences of length, in tokens.

    `prompts`: the number of distinct prompts, taken as the number of independent pairs, because pairs of one prompt are alike.
    """
    x_V, y_V = np.asarray(differences, dtype=np.float64), np.asarray(margins, dtype=np.float64)
    x_axis, y_axis = _Axis.of(x_V, 0, WIDTH), _Axis.of(y_V, HEIGHT, 0)
    drawn = np.linspace(0, len(x_V) - 1, min(len(x_V), _LARGEST_SCATTER)).round().astype(int)
    points = [
        Point(
            round(x_axis.place(x), 1),
            round(y_axis.place(y), 1),
            is_positive=y > 0,
            title=f"{x:+.0f} tokens, margin {y:+,.4f}",
        )
        for x, y in zip(x_V[drawn].tolist(), y_V[drawn].tolist(), strict=True)
    ]
    correlation = _correlation(x_V, y_V)
    return LengthScatter(
        points,
        len(x_V),
        (round(x_axis.place(0), 1), round(y_axis.place(0), 1)),
        x_axis.ticks(_BETWEEN_TICKS),
        y_axis.ticks(_BETWEEN_LINES),
        None if correlation is None else _trend(x_V, y_V, x_axis, y_axis),
        correlation,
        min(1.0, _Z95 / np.sqrt(prompts)),
    )


@dataclass(frozen=True)
class _Axis:
    """A linear map of the values `low` to `high` to the places `start` to `end`. Zero is always among the values."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, values: Floats, start: float, end: float) -> "_Axis":
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        return cls(low, high if high > low else low + 1.0, start, end)

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, apart: float) -> list[Tick]:
        return _ticks((self.start, self.low), (self.place(0), 0.0), (self.end, self.high), apart=apart)


def _ticks(low: tuple[float, float], zero: tuple[float, float], high: tuple[float, float], apart: float) -> list[Tick]:
    """Return ticks at zero and at both ends, given as (place, value). Omit an end less than `apart` from zero."""
    ends = [end for end in (low, high) if abs(end[0] - zero[0]) >= apart]
    return [Tick(round(at, 1), f"{value:.3g}") for at, value in sorted([zero, *ends])]


def _correlation(x_V: Floats, y_V: Floats) -> float | None:
    if np.ptp(x_V) == 0 or np.ptp(y_V) == 0:
        return None
    # Both are scaled first: the products of tiny or huge margins leave the range of floats.
    x_V, y_V = ((values - values.mean()) / np.abs(values - values.mean()).max() for values in (x_V, y_V))
    return float((x_V * y_V).sum() / np.sqrt((x_V**2).sum() * (y_V**2).sum()))


def _trend(x_V: Floats, y_V: Floats, x_axis: _Axis, y_axis: _Axis) -> tuple[float, float, float, float]:
    """Return both ends of the least-squares line over the range of the differences, in units of the drawing."""
    deviations_V = x_V - x_V.mean()
    slope = float((deviations_V * y_V).sum() / (deviations_V**2).sum())
    low, high = float(x_V.min()), float(x_V.max())
    at_low, at_high = (float(y_V.mean()) + slope * (x - float(x_V.mean())) for x in (low, high))
    places = (x_axis.place(low), y_axis.place(at_low), x_axis.place(high), y_axis.place(at_high))
    x1, y1, x2, y2 = (round(place, 1) for place in places)
    return x1, y1, x2, y2
