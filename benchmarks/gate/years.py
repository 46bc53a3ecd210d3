"""Years of 52 retrainings under several rules, and their rates of error.

All rules see the same candidates and the same held-out prompts. Their champions differ.
"""

import copy
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.gate.anytime import WEEKS, Anytime
from benchmarks.gate.champions import Champions, FixedTest, Rule
from benchmarks.gate.estimate import Estimate
from benchmarks.gate.policies import Policies, Scenario

YEARS_A_BATCH = 200
LADDER, FIVE_PERCENT, ANYTIME = "ladder", "5% each time", "anytime"
ANYTIME_ARRIVING = "anytime, arriving only"


@dataclass(frozen=True)
class Rates:
    """`discovery_rate`: false promotions of all promotions in a year, 0 without one. `excess`: in standard errors."""

    discovery_rate: Estimate
    any_false: Estimate
    excess: Estimate
    promotions: Estimate
    quality: Estimate

    @classmethod
    def of(cls, years: Sequence[Champions]) -> "Rates":
        false, promotions = (
            np.concatenate([getattr(batch, name) for batch in years]) for name in ("false_Y", "promotions_Y")
        )
        return cls(
            Estimate.of(false / np.maximum(1, promotions)),
            Estimate.of(false > 0),
            Estimate.of(np.concatenate([batch.policies.excess_Y for batch in years])),
            Estimate.of(promotions),
            Estimate.of(np.concatenate([batch.policies.quality_Y for batch in years])),
        )


def simulate(scenario: Scenario, prompts: int, years: int, workers: int = 1) -> dict[str, Rates]:
    """Return the rates of each rule."""
    batches = math.ceil(years / YEARS_A_BATCH)
    arguments = [scenario] * batches, [prompts] * batches, range(batches)
    if workers == 1:
        found = list(map(_batch, *arguments))
    else:
        with ProcessPoolExecutor(workers) as pool:
            found = list(pool.map(_batch, *arguments))
    return {rule: Rates.of([batch[rule] for batch in found]) for rule in found[0]}


def _batch(scenario: Scenario, prompts: int, batch: int) -> dict[str, Champions]:
    random = np.random.default_rng([list(Scenario).index(scenario), prompts, batch])
    first = Policies.draw(random, np.zeros(YEARS_A_BATCH), prompts)
    rules: dict[str, Rule] = {
        LADDER: FixedTest(_champions(first), 1.0),
        FIVE_PERCENT: FixedTest(_champions(first), 1.645),
        ANYTIME: Anytime(_champions(first), random, keeps_best=scenario.keeps_best),
    }
    if scenario == Scenario.TUNED:
        rules[ANYTIME_ARRIVING] = Anytime(_champions(first), random, held_out=False)
    for _ in range(WEEKS):
        for rule in rules.values():
            rule.settle()
        candidates = scenario.candidates(random, YEARS_A_BATCH, prompts)
        for rule in rules.values():
            rule.register(candidates)
    return {name: rule.champions for name, rule in rules.items()}


def _champions(first: Policies) -> Champions:
    return Champions(copy.deepcopy(first))
