"""The rules that judge every candidate on the same held-out prompts, and the champions that any rule makes.

Legend: Y years, N held-out prompts.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.gate.policies import Policies
from model_registry.gate.betting import Floats

Ints = npt.NDArray[np.int64]


@dataclass
class Champions:
    """The champion of each year, and the counts of promotions so far. A promotion is false if the new one is not better."""

    policies: Policies
    promotions_Y: Ints = field(init=False)
    false_Y: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.promotions_Y = np.zeros(len(self.policies.quality_Y), dtype=np.int64)
        self.false_Y = np.zeros_like(self.promotions_Y)

    def replace(self, years: Ints, quality: Floats, scores: Floats) -> None:
        """Make other policies champions of `years`."""
        self.promotions_Y[years] += 1
        self.false_Y[years] += quality <= self.policies.quality_Y[years]
        self.policies.quality_Y[years] = quality
        self.policies.scores_NY[:, years] = scores


class Rule(Protocol):
    """A rule of the gate, in many years at once."""

    champions: Champions

    def settle(self) -> None:
        """Score the pairs that arrived in a week, and decide about the waiting candidates."""

    def register(self, candidates: Policies) -> None:
        """Decide about the candidates of a week."""


@dataclass
class FixedTest:
    """Promote a candidate if its mean held-out score is better by more than `errors` standard errors.

    One standard error: the rule `ladder`. 1.645: a test at level 5%, each time.
    """

    champions: Champions
    errors: float

    def settle(self) -> None:
        """Nothing waits."""

    def register(self, candidates: Policies) -> None:
        gains_NY = candidates.scores_NY - self.champions.policies.scores_NY
        error_Y = gains_NY.std(axis=0, ddof=1) / math.sqrt(len(gains_NY))
        years = np.flatnonzero(gains_NY.mean(axis=0) > self.errors * error_Y)
        self.champions.replace(years, candidates.quality_Y[years], candidates.scores_NY[:, years])
