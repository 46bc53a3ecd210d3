"""The capital and the levels of the gate `anytime`, for many comparisons at once.

They are `betting.log_capitals`, `betting.log_evidence` and `e_lond.level` for arrays. Tests compare them.

Legend: N prompts, S shares, M comparisons.
"""

from functools import cache

import numpy as np

from model_registry.gate.anytime import CLIP_DEVIATIONS, CLIP_PROMPTS
from model_registry.gate.betting import SHARES, Floats
from model_registry.gate.e_lond import level

ALPHA = 0.05
_PROMPTS_A_PRODUCT = 50  # so that no product of floats is 0


def log_capitals(differences_NM: Floats) -> Floats:
    """Return float64[S, M]: the logarithm of the capital for each share. `differences_NM` are within [-1, 1]."""
    logs_SM = np.zeros((len(SHARES), *differences_NM.shape[1:]))
    for first in range(0, len(differences_NM), _PROMPTS_A_PRODUCT):
        part_NM = np.ascontiguousarray(differences_NM[first : first + _PROMPTS_A_PRODUCT])
        factors_NM = np.empty_like(part_NM)
        for at, share in enumerate(SHARES):
            np.multiply(part_NM, share, out=factors_NM)
            factors_NM += 1
            logs_SM[at] += np.log(np.multiply.reduce(factors_NM, axis=0))
    return logs_SM


def log_evidence(logs_SM: Floats) -> Floats:
    """Return float64[M]: the logarithm of the mean capital of all shares."""
    highest_M = logs_SM.max(axis=0)
    evidence_M: Floats = highest_M + np.log(np.exp(logs_SM - highest_M).mean(axis=0))
    return evidence_M


def clips(differences_NM: Floats) -> Floats:
    """Return float64[M]: four standard deviations of the first held-out differences."""
    deviations_M: Floats = differences_NM[: prompts_for_clip(len(differences_NM))].std(axis=0, ddof=1)
    return CLIP_DEVIATIONS * deviations_M


def prompts_for_clip(prompts: int) -> int:
    """Return how many of the first held-out prompts choose the clip, as `anytime.choose_clip` does."""
    return max(CLIP_PROMPTS, prompts // 5) if prompts >= 2 * CLIP_PROMPTS else prompts


def clipped(differences_NM: Floats, clips_M: Floats) -> Floats:
    return np.clip(differences_NM / clips_M, -1, 1)


@cache
def log_levels(numbers: int, promotions: int) -> Floats:
    """Return the logarithms of the levels, for hypotheses 0 to `numbers` - 1 after 0 to `promotions` - 1 promotions.

    Hypotheses are counted from 1, so row 0 is never used.
    """
    rows = [[level(ALPHA, max(1, number), before) for before in range(promotions)] for number in range(numbers)]
    return np.log(np.array(rows))
