"""The power of the gate `anytime`: how soon it promotes a candidate that is better.

A gain is in paired standard errors. One is the standard deviation of a difference divided by the root of the number of prompts.

Legend: N prompts, R simulated candidates.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from benchmarks.gate.anytime import PAIRS
from benchmarks.gate.capital import ALPHA, clipped, clips, log_capitals, log_evidence, prompts_for_clip
from model_registry.gate.betting import Floats
from model_registry.gate.e_lond import level

HELD_OUT = 500
DISCORDANT = 0.1  # the share of pairs that only one of the two policies ranks rightly
_LARGEST_GAIN = 32.0
_BISECTIONS = 14


class Metric(StrEnum):
    """The compared value. The text of a member names it in tables."""

    LOSS = "losses"
    ERROR = "errors, 10% discordant"

    def differences(self, random: np.random.Generator, gain: float, prompts: int, runs: int) -> Floats:
        """Return float64[N, R] in [-1, 1], whose mean is `gain` paired standard errors of a week's pairs."""
        mean = gain / math.sqrt(PAIRS)
        if self == Metric.ERROR:
            uniform_NR = random.random((prompts, runs))
            better = (DISCORDANT + mean * math.sqrt(DISCORDANT)) / 2
            return np.where(uniform_NR < better, 1.0, np.where(uniform_NR < DISCORDANT, -1.0, 0.0))
        clip_R = clips(random.standard_normal((HELD_OUT, runs)))
        return clipped(mean + random.standard_normal((prompts, runs)), clip_R)


def power(metric: Metric, number: int, gain: float, weeks: int, runs: int) -> float:
    """Return the share of candidates that the gate promotes within `weeks` weeks of arriving pairs, without held-out ones.

    Each is hypothesis `number`, before any promotion. The gate looks at its evidence once a week.
    """
    differences_NR = metric.differences(np.random.default_rng(0), gain, weeks * PAIRS, runs)
    logs_SR = np.zeros(())
    is_promoted_R = np.zeros(runs, dtype=np.bool_)
    for first in range(0, weeks * PAIRS, PAIRS):
        logs_SR = logs_SR + log_capitals(differences_NR[first : first + PAIRS])
        is_promoted_R |= log_evidence(logs_SR) >= -math.log(level(ALPHA, number, 0))
    return float(is_promoted_R.mean())


def needed_gains(number: int, shares: Sequence[float], runs: int) -> tuple[list[float], list[float]]:
    """Return the gain on HELD_OUT prompts with which these shares of candidates are promoted at once: true, and measured.

    Evidence rises with the true gain. So each candidate has a smallest gain with which it passes, found by bisection. Their
    quantiles are the result. The measured gain is the true one plus the noise of the prompts.
    """
    noise_NR = np.random.default_rng(1).standard_normal((HELD_OUT, runs))
    used, clip_R, needed = prompts_for_clip(HELD_OUT), clips(noise_NR), -math.log(level(ALPHA, number, 0))
    low_R, high_R = np.zeros(runs), np.full(runs, _LARGEST_GAIN)
    for _ in range(_BISECTIONS):
        gain_R = (low_R + high_R) / 2
        differences_NR = clipped(gain_R / math.sqrt(HELD_OUT) + noise_NR[used:], clip_R)
        passes_R = log_evidence(log_capitals(differences_NR)) >= needed
        low_R, high_R = np.where(passes_R, low_R, gain_R), np.where(passes_R, gain_R, high_R)
    measured_R = high_R + noise_NR.mean(axis=0) * math.sqrt(HELD_OUT)
    return np.quantile(high_R, shares).tolist(), np.quantile(measured_R, shares).tolist()
