"""The accuracy of a policy: in how many pairs the chosen response has the higher reward, with its 95% confidence interval.

The interval is Wilson's (1927), which unlike the normal one is right near 0 and 1 as well. It takes trials for independent, and
pairs of one prompt are alike: where a prompt has four pairs, what is said to be 95% can be 75%. So they count as the number of
independent pairs whose share would vary as much, by the variance for clusters with the factor G / (G - 1) for G prompts (Dean
and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered Surveys"; the gate's standard
error is of the same kind); and as fewer, since that variance is known from G prompts only, by the squared ratio of Student's
quantiles (Korn and Graubard 1998). Where every pair has a prompt of its own, that is the number of pairs.

Legend: V pairs of G prompts.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

_Z95 = 1.959963984540054  # 97.5% of a normal distribution lie below it


@dataclass(frozen=True)
class Accuracy:
    """Of so many pairs, with so many prompts among them, the share that is ranked as its label says."""

    pairs: int
    prompts: int
    share: float
    interval: tuple[float, float]


def accuracy(won_V: npt.NDArray[np.bool_], prompts_V: npt.NDArray[np.int64]) -> Accuracy:
    """`won_V`: whether the chosen response has the higher reward, of one pair at least; `prompts_V`: any number per prompt."""
    won, pairs = int(won_V.sum()), len(won_V)
    _, prompts_V = np.unique(prompts_V, return_inverse=True)
    prompts = int(prompts_V.max()) + 1
    return Accuracy(pairs, prompts, won / pairs, wilson_interval(won / pairs, independent_pairs(won_V, prompts_V)))


def independent_pairs(won_V: npt.NDArray[np.bool_], prompts_V: npt.NDArray[np.int64]) -> float:
    """As how many pairs of a prompt each they count, at most V. `prompts_V`: from 0 to G - 1."""
    share, sizes_G = won_V.mean(), np.bincount(prompts_V)
    pairs, prompts = len(prompts_V), len(sizes_G)
    if prompts == pairs:
        return pairs
    if prompts == 1 or share in (0, 1):  # nothing tells how alike they are
        return prompts
    errors_G = np.bincount(prompts_V, won_V) - share * sizes_G
    variance = prompts / (prompts - 1) * float((errors_G**2).sum()) / pairs**2
    # That of so many independent pairs is share * (1 - share) / (so many - 1).
    found = min(pairs, 1 + float(share * (1 - share)) / variance) if variance else pairs
    return found * float(stdtrit(pairs - 1, 0.975) / stdtrit(prompts - 1, 0.975)) ** 2


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """The 95% interval of a proportion that was found in so many independent trials; it holds `share` in floats as well."""
    z2 = _Z95**2
    centre = share + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    low, high = ((centre + sign * spread) / (1 + z2 / trials) for sign in (-1, 1))
    return max(0.0, min(share, low)), min(1.0, max(share, high))
