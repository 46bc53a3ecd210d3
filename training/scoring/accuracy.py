"""The accuracy of a policy with its 95% confidence interval.

The interval is Wilson's (1927), because the normal one is wrong near 0 and 1. Wilson assumes independent trials, but pairs of
one prompt are alike: with four pairs per prompt a nominal 95% can be 75%. So the interval uses an effective number of pairs:

1. The number of independent pairs with the same variance of the share. The variance is the one for clusters, with the factor
   G / (G - 1) (Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered Surveys").
   The gate's standard error is of the same kind.
2. Times the squared ratio of Student's quantiles, because only G prompts estimate that variance (Korn and Graubard 1998).

If every pair has its own prompt, the effective number is the number of pairs.

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
    """The share of correctly ranked pairs and its 95% interval, with the numbers of pairs and prompts."""

    pairs: int
    prompts: int
    share: float
    interval: tuple[float, float]


def accuracy(won_V: npt.NDArray[np.bool_], prompts_V: npt.NDArray[np.int64]) -> Accuracy:
    """Return the accuracy of at least one pair.

    `won_V`: whether the chosen response has the higher reward. `prompts_V`: a number for each pair, equal for equal prompts.
    """
    won, pairs = int(won_V.sum()), len(won_V)
    _, prompts_V = np.unique(prompts_V, return_inverse=True)
    prompts = int(prompts_V.max()) + 1
    return Accuracy(pairs, prompts, won / pairs, wilson_interval(won / pairs, independent_pairs(won_V, prompts_V)))


def independent_pairs(won_V: npt.NDArray[np.bool_], prompts_V: npt.NDArray[np.int64]) -> float:
    """Return the effective number of independent pairs, at most V. `prompts_V` holds 0 to G - 1."""
    share, sizes_G = won_V.mean(), np.bincount(prompts_V)
    pairs, prompts = len(prompts_V), len(sizes_G)
    if prompts == pairs:
        return pairs
    if prompts == 1 or share in (0, 1):  # the variance between prompts cannot be estimated
        return prompts
    errors_G = np.bincount(prompts_V, won_V) - share * sizes_G
    variance = prompts / (prompts - 1) * float((errors_G**2).sum()) / pairs**2
    # The variance of n independent pairs is share * (1 - share) / (n - 1).
    equivalent = min(pairs, 1 + float(share * (1 - share)) / variance) if variance else pairs
    return equivalent * float(stdtrit(pairs - 1, 0.975) / stdtrit(prompts - 1, 0.975)) ** 2


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the 95% interval of a share of `trials` independent trials. It always contains `share`, despite rounding."""
    z2 = _Z95**2
    centre = share + z2 / (2 * trials)
    spread = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    low, high = ((centre + sign * spread) / (1 + z2 / trials) for sign in (-1, 1))
    return max(0.0, min(share, low)), min(1.0, max(share, high))
