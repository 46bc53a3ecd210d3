"""The share of false promotions, held below alpha at any time: e-LOND.

Every comparison of a candidate with a champion is a hypothesis, numbered 1, 2, 3, ... A candidate is promoted when its evidence
reaches 1 / level, with

    level = alpha * gamma(number) * (1 + promotions so far)

The gammas sum to 1. Then the expected share of false promotions among all promotions, the false discovery rate, is at most
alpha at any time. The hypotheses may depend on each other. Proof: a false promotion by hypothesis t adds at most level /
(1 + promotions before) times its evidence to that share. The first factor is alpha * gamma(t), and the expected evidence is at
most 1.

    Xu and Ramdas 2024, "Online multiple testing with e-values" (arXiv 2311.06412)
"""

import math


def gamma(number: int) -> float:
    """Return the part of alpha for hypothesis `number`, counted from 1: 6 / (pi * number)^2. All parts sum to 1."""
    assert number >= 1, f"hypothesis {number}, but they are counted from 1"
    return 6 / (math.pi * number) ** 2


def level(alpha: float, number: int, promotions: int) -> float:
    """Return the level of hypothesis `number` after that many promotions, at most 1."""
    return min(1.0, alpha * gamma(number) * (1 + promotions))
