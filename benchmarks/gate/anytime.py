"""The rule `anytime` of the gate, in many years at once.

    settle     200 pairs arrive: each waiting candidate bets on them; then decide
    register   the held-out prompts give a new candidate its starting capital; if six wait, one retires; then decide
    decide     promote the waiting candidate with the largest evidence times level, if it reaches its level
    restart    after a promotion, each waiting candidate begins a new hypothesis, the newest first, at capital 1

Legend: Y years, N held-out prompts, P pairs that arrive in a week, W waiting candidates, S shares.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.gate.capital import clipped, clips, log_capitals, log_evidence, log_levels, prompts_for_clip
from benchmarks.gate.champions import Champions, Ints
from benchmarks.gate.policies import OWN, Policies
from model_registry.gate.betting import SHARES, Floats

WAITING = 5
PAIRS = 200
WEEKS = 52
_MOST_NUMBERS = WEEKS * (1 + WAITING) + 1


@dataclass
class Waiting:
    """The waiting candidates, each with its open hypothesis."""

    quality_WY: Floats
    scores_WNY: Floats
    logs_SWY: Floats
    clip_WY: Floats
    is_used_WY: npt.NDArray[np.bool_]
    week_WY: Ints
    number_WY: Ints

    @classmethod
    def none(cls, prompts: int, years: int) -> "Waiting":
        shape = (WAITING, years)
        zeros, counts, logs = np.zeros(shape), np.zeros(shape, dtype=np.int64), np.zeros((len(SHARES), *shape))
        scores = np.zeros((WAITING, prompts, years))
        return cls(zeros, scores, logs, np.ones(shape), np.zeros(shape, dtype=np.bool_), counts, counts.copy())


@dataclass
class Anytime:
    """`held_out`: whether held-out prompts give a starting capital. `keeps_best`: the one with least evidence retires."""

    champions: Champions
    random: np.random.Generator
    held_out: bool = True
    keeps_best: bool = False
    week: int = 0
    waiting: Waiting = field(init=False)
    next_Y: Ints = field(init=False)

    def __post_init__(self) -> None:
        scores_NY = self.champions.policies.scores_NY
        self.waiting = Waiting.none(*scores_NY.shape)
        self.next_Y = np.ones(scores_NY.shape[1], dtype=np.int64)

    def settle(self) -> None:
        self.week += 1
        waiting, champions = self.waiting, self.champions.policies
        own_PWY = OWN * self.random.standard_normal((PAIRS, *waiting.quality_WY.shape))
        champions_P1Y = OWN * self.random.standard_normal((PAIRS, 1, len(champions.quality_Y)))
        differences_PWY = waiting.quality_WY - champions.quality_Y + own_PWY - champions_P1Y
        waiting.logs_SWY += log_capitals(clipped(differences_PWY, waiting.clip_WY))
        self._decide()

    def register(self, candidates: Policies) -> None:
        waiting, years = self.waiting, np.arange(len(self.next_Y))
        importance_WY = log_evidence(waiting.logs_SWY) if self.keeps_best else waiting.week_WY
        slots = np.where(waiting.is_used_WY, importance_WY, -math.inf).argmin(axis=0)
        differences_NY = candidates.scores_NY - self.champions.policies.scores_NY
        clip_Y, used = clips(differences_NY), prompts_for_clip(len(differences_NY))
        bets_NY = clipped(differences_NY[used:], clip_Y) if self.held_out else differences_NY[:0]
        waiting.logs_SWY[:, slots, years] = log_capitals(bets_NY)
        waiting.quality_WY[slots, years] = candidates.quality_Y
        waiting.scores_WNY[slots, :, years] = candidates.scores_NY.T
        waiting.clip_WY[slots, years] = clip_Y
        waiting.week_WY[slots, years] = self.week
        waiting.number_WY[slots, years] = self.next_Y
        waiting.is_used_WY[slots, years] = True
        self.next_Y += 1
        self._decide()

    def _decide(self) -> None:
        waiting = self.waiting
        levels = log_levels(_MOST_NUMBERS, WEEKS + 1)[waiting.number_WY, self.champions.promotions_Y]
        surplus_WY = np.where(waiting.is_used_WY, log_evidence(waiting.logs_SWY) + levels, -math.inf)
        years = np.flatnonzero(surplus_WY.max(axis=0) >= 0)
        if not len(years):
            return
        slots = surplus_WY[:, years].argmax(axis=0)
        self.champions.replace(years, waiting.quality_WY[slots, years], waiting.scores_WNY[slots, :, years].T)
        waiting.is_used_WY[slots, years] = False
        self._restart(years)

    def _restart(self, years: Ints) -> None:
        """Begin new hypotheses in `years`. An unused slot gets values that nothing reads."""
        waiting = self.waiting
        is_used = waiting.is_used_WY[:, years]
        newest_first = np.argsort(np.argsort(np.where(is_used, -waiting.week_WY[:, years], WEEKS + 1), axis=0), axis=0)
        waiting.number_WY[:, years] = np.where(is_used, self.next_Y[years] + newest_first, 0)
        self.next_Y[years] += is_used.sum(axis=0)
        waiting.logs_SWY[:, :, years] = 0
        differences = waiting.scores_WNY[:, :, years] - self.champions.policies.scores_NY[:, years]
        deviations = clips(np.moveaxis(differences, 1, 0))
        waiting.clip_WY[:, years] = np.where(is_used, deviations, 1)
