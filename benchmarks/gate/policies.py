"""Simulated policies: their true quality, and their scores on the held-out prompts.

A score is the true quality plus a deviation of the prompt. The part of the deviations that all policies share cancels in a
difference, so it is left out. The own part has variance 1/2. So the difference of two policies has standard deviation 1, and
all comparisons with one champion share the champion's part. Higher scores are better. The first champion has quality 0.

Legend: Y years, N held-out prompts.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from model_registry.gate.betting import Floats

OWN = math.sqrt(0.5)
WORSE = -0.05
SPREAD = 0.1
CHOICES = 20


@dataclass
class Policies:
    """One policy in each year."""

    quality_Y: Floats
    scores_NY: Floats

    @classmethod
    def draw(cls, random: np.random.Generator, quality_Y: Floats, prompts: int) -> "Policies":
        return cls(quality_Y, quality_Y + OWN * random.standard_normal((prompts, len(quality_Y))))

    @property
    def excess_Y(self) -> Floats:
        """By how much the mean of the held-out scores is too good, in standard errors of a difference."""
        excess: Floats = (self.scores_NY.mean(axis=0) - self.quality_Y) * math.sqrt(len(self.scores_NY))
        return excess


class Scenario(StrEnum):
    """How candidates are made. The text of a member names it in tables.

    ADVERSARIAL: all candidates are equal, and an adversary watches the arriving pairs. The best of equal policies, by the pairs
    so far, is registered. The waiting candidate with the least evidence retires, so lucky ones wait on.
    """

    EQUAL = "equal"
    WORSE = "worse"
    MIXED = "mixed"
    ADVERSARIAL = "chosen on arrived pairs"
    TUNED = "chosen on held-out pairs"

    def candidates(self, random: np.random.Generator, years: int, prompts: int) -> Policies:
        """Return a new candidate for each year.

        Its quality is 0, or WORSE, or normal with standard deviation SPREAD. If it is TUNED, it is the best of CHOICES equal
        policies by their mean scores on the held-out prompts. Given this mean, its deviations are still normal.
        """
        match self:
            case Scenario.WORSE:
                return Policies.draw(random, np.full(years, WORSE), prompts)
            case Scenario.MIXED:
                return Policies.draw(random, SPREAD * random.standard_normal(years), prompts)
            case Scenario.TUNED:
                made = Policies.draw(random, np.zeros(years), prompts)
                best_Y = OWN / math.sqrt(prompts) * random.standard_normal((CHOICES, years)).max(axis=0)
                made.scores_NY += best_Y - made.scores_NY.mean(axis=0)
                return made
        # EQUAL and ADVERSARIAL. If pairs that arrived earlier choose the best of equal policies, the choice shows nothing about
        # the pairs that judge it, which are others. So the best is drawn like any of them.
        return Policies.draw(random, np.zeros(years), prompts)

    @property
    def keeps_best(self) -> bool:
        """Whether the waiting candidate with the least evidence retires, not the oldest."""
        return self == Scenario.ADVERSARIAL
