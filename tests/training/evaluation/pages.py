"""Reports with chosen contents, for tests of the page."""

from datetime import UTC, datetime
from typing import Any

import numpy as np

from training.contract.config.loss import Loss
from training.evaluation.examples import Sample, WorstPair
from training.evaluation.report import Report, render
from training.evaluation.token_rewards import RewardedPair, RewardedResponse, RewardedToken, TokenRewards
from training.scoring.accuracy import Accuracy, accuracy

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} & \"quoted\" 'too'"
METRICS = {"loss": 0.5, "rewards/chosen": 0.75, "rewards/rejected": -0.25, "rewards/margins": 1.0}


def of_own_prompts(won: int, pairs: int) -> Accuracy:
    return accuracy(np.arange(pairs) < won, np.arange(pairs))


def metrics_of(**more: float) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in (METRICS | more).items()}


def response(*tokens: tuple[str, float | None], omitted: int = 0) -> RewardedResponse:
    rewards = [reward for _, reward in tokens if reward is not None]
    return RewardedResponse([RewardedToken(*token) for token in tokens], omitted, sum(rewards), len(rewards))


def rewards_of(text: str = "yes", beta: float | None = 0.1) -> TokenRewards:
    pair = RewardedPair(7, text, response((text, 0.5), (text, None)), response((text, -0.25)))
    return TokenRewards([pair], beta)


def page_of(**changes: Any) -> str:
    margins = changes.get("margins", [-1.0, 0.25, 0.5, -0.1])
    report: dict[str, Any] = {
        "policy": "abc",
        "reference": "def",
        "pairs": "123",
        "model_name": "helper",
        "date": datetime(2026, 5, 4, 3, 2, tzinfo=UTC),
        "loss": Loss(),
        "reference_loss": 0.6931,
        "metrics": metrics_of(),
        "accuracy": of_own_prompts(2, 4),
        "by_length": {"chosen longer": of_own_prompts(2, 3), "same length": of_own_prompts(0, 1)},
        "by_source": {},
        "margins": margins,
        "length_differences": list(range(len(margins))),
        "samples": [Sample(1, "p", "b", "a", "c")],
        "worst": [WorstPair(7, 2.5, -1.0, "p", "c", "r")],
        "rewards": rewards_of(),
    }
    return render(Report(**{**report, **changes}))
