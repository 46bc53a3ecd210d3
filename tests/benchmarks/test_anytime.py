"""The simulated rule `anytime` in single weeks: who waits, who is promoted, and which hypotheses begin again."""

import numpy as np
import pytest

from benchmarks.gate.anytime import WAITING, Anytime
from benchmarks.gate.champions import Champions, FixedTest
from benchmarks.gate.policies import Policies
from model_registry.gate import ladder
from model_registry.gate.scores import GateMetric, PairedScores
from training.contract.config.release import Gate

PROMPTS = 100
METRICS = {"eval/rewards/accuracies": 0.5}


def policies(*quality: float) -> Policies:
    """Return one policy for each year, with noise that depends on the qualities."""
    seed = [round(100 * (1 + value)) for value in quality]
    return Policies.draw(np.random.default_rng(seed), np.array(quality, dtype=np.float64), PROMPTS)


def losses(made: Policies) -> dict[str, float]:
    return {str(at): -float(score) for at, score in enumerate(made.scores_NY[:, 0])}


def rule(years: int, **options) -> Anytime:
    return Anytime(Champions(policies(*[0.0] * years)), np.random.default_rng(1), **options)


def test_the_oldest_candidate_retires() -> None:
    anytime = rule(1)
    for _ in range(WAITING + 2):
        anytime.settle()
        anytime.register(policies(-0.5))
    assert sorted(anytime.waiting.number_WY[:, 0]) == [3, 4, 5, 6, 7]


def test_with_keeps_best_the_candidate_with_the_least_evidence_retires() -> None:
    anytime = rule(1, held_out=False, keeps_best=True)
    for quality in (-0.1, -0.1, -0.9, -0.1, -0.1, -0.1):
        anytime.settle()
        anytime.register(policies(quality))
    assert sorted(anytime.waiting.number_WY[:, 0]) == [1, 2, 4, 5, 6]


def test_a_much_better_candidate_is_promoted_at_once_and_the_others_begin_again() -> None:
    anytime = rule(2)
    for quality in (-0.5, -0.5):
        anytime.settle()
        anytime.register(policies(quality, quality))
    anytime.settle()
    anytime.register(policies(2.0, -0.5))
    waiting = anytime.waiting
    assert anytime.champions.promotions_Y.tolist() == [1, 0]
    assert anytime.champions.false_Y.tolist() == [0, 0]
    assert anytime.champions.policies.quality_Y.tolist() == [2.0, 0.0]
    newest_first = np.argsort(-waiting.week_WY[waiting.is_used_WY[:, 0], 0])
    assert waiting.number_WY[waiting.is_used_WY[:, 0], 0][newest_first].tolist() == [4, 5]
    assert (waiting.logs_SWY[:, :, 0] == 0).all()
    assert anytime.next_Y.tolist() == [6, 4]


def test_a_better_candidate_is_promoted_by_arriving_pairs() -> None:
    anytime = rule(1, held_out=False)
    anytime.register(policies(0.5))
    assert anytime.champions.promotions_Y.tolist() == [0]
    anytime.settle()
    assert anytime.champions.promotions_Y.tolist() == [1]


@pytest.mark.parametrize("quality", [0.0, 0.1, 0.2])
def test_one_standard_error_is_the_rule_ladder(quality: float) -> None:
    champion, candidate = policies(0.0), policies(quality)
    decision = ladder.decide(
        PairedScores(GateMetric.LOSS, losses(candidate), losses(champion)), METRICS, Gate(type="ladder")
    )
    fixed = FixedTest(Champions(champion), 1.0)
    fixed.register(candidate)
    assert bool(fixed.champions.promotions_Y[0]) == decision.promote
