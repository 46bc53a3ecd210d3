"""A test that may be read at any time: betting on score differences between a candidate and the champion.

A difference is the champion's score minus the candidate's for one prompt, in [-1, 1]; lower scores are better. The null
hypothesis says: given all earlier prompts, its mean is at most 0, so the candidate is not better.

A gambler starts with capital 1 and bets on the candidate. With the share s of the capital, a difference d multiplies it by
1 + s * d. Under the null hypothesis, the expected capital never rises above 1 (an e-process). So the capital ever reaches 1/a
with a probability of at most a (Ville's inequality), however often one looks and whenever one stops.

    Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting" (arXiv 2010.09686)
    Choe and Ramdas 2024, "Comparing sequential forecasters" (arXiv 2110.00115)

The best share depends on the unknown mean. So the capital is split evenly over SHARES, and each part keeps its share. The sum
is an e-process too. It depends on the differences alone, not on their order, so anybody can recompute it from the scores.

Legend: N differences, S shares.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHARES: Floats = (np.arange(20) + 0.5) / 20
_MEANS = 200
_POWER = 0.8
_POWER_QUANTILE = 0.8416  # of the normal distribution, for _POWER
MOST_PROMPTS = 1_000_000


def log_capitals(differences_N: npt.ArrayLike) -> Floats:
    """Return float64[S]: for each share, the logarithm of the capital that began with 1."""
    differences = _checked(differences_N)
    logs: Floats = np.log1p(np.multiply.outer(SHARES, differences)).sum(axis=-1)
    return logs


def log_evidence(differences_N: npt.ArrayLike) -> float:
    """Return the natural logarithm of the capital: the evidence that the candidate is better. 0 without differences."""
    return _log_mean(log_capitals(differences_N))


def confidence_sequence(differences_N: npt.ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """Return the lowest and the highest plausible mean of the differences.

    The true mean is inside at all times at once, with probability 1 - `alpha`. A mean m is plausible if betting on higher and
    betting on lower differences than m, each with half of the capital, has not reached 1/alpha.
    """
    differences = _checked(differences_N)
    means = np.linspace(-1, 1, _MEANS + 1)[1:-1]
    plausible = [float(mean) for mean in means if _log_hedged_capital(differences, mean) < -math.log(alpha)]
    if not plausible:
        return (float(differences.mean()),) * 2
    step = 2 / _MEANS
    return max(-1.0, plausible[0] - step), min(1.0, plausible[-1] + step)


def _log_hedged_capital(differences_N: Floats, mean: float) -> float:
    """Return the logarithm of the capital that bet on differences higher and, the other half, lower than `mean`.

    (d - mean) / (1 + mean) and (mean - d) / (1 - mean) are at least -1, as a bet with a share below 1 needs.
    """
    bets_2N = ((differences_N - mean) / (1 + mean), (mean - differences_N) / (1 - mean))
    return _log_mean(np.concatenate([np.log1p(np.multiply.outer(SHARES, bet_N)).sum(axis=-1) for bet_N in bets_2N]))


def prompts_needed(differences_N: npt.ArrayLike, needed_log_evidence: float) -> int | None:
    """Return how many more prompts with such differences reach the needed evidence with probability 0.8.

    Return 0 if it is reached already, and None if these differences do not favour the candidate. The increments of the best
    share's log-capital are taken as normal. Its capital alone is counted, so the result is rather too high.
    """
    differences = _checked(differences_N)
    if log_evidence(differences) >= needed_log_evidence:
        return 0
    if len(differences) < 2:
        return None
    increments_SN = np.log1p(np.multiply.outer(SHARES, differences))
    best = int(increments_SN.mean(axis=1).argmax())
    growth, spread = float(increments_SN[best].mean()), float(increments_SN[best].std(ddof=1))
    missing = needed_log_evidence - float(increments_SN[best].sum()) + math.log(len(SHARES))
    if growth <= 0:
        return None
    # n * growth - quantile * spread * sqrt(n) = missing
    root = (_POWER_QUANTILE * spread + math.sqrt((_POWER_QUANTILE * spread) ** 2 + 4 * growth * missing)) / (2 * growth)
    return min(MOST_PROMPTS, math.ceil(root**2))


def _checked(differences_N: npt.ArrayLike) -> Floats:
    differences: npt.NDArray[Any] = np.asarray(differences_N, dtype=np.float64)
    assert differences.ndim == 1, f"differences of shape {differences.shape}, expected [N]"
    assert bool((np.abs(differences) <= 1).all()), "a difference is outside [-1, 1]"
    return differences


def _log_mean(logs: Floats) -> float:
    highest = float(logs.max())
    return highest + math.log(float(np.exp(logs - highest).mean()))
