"""What a gate compares: the values of two policies on the same pairs, its decision, and the floors of the recipe."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from training.contract.config.release import Gate

# With fewer prompts, the standard error is too uncertain for a decision.
MIN_PROMPTS = 10

Values = Mapping[str, float]  # by pair
Prompts = Mapping[str, str]  # by pair; a pair without an entry has its own prompt
_OWN_PROMPTS: Prompts = {}


class GateMetric(StrEnum):
    """The compared value of a pair, the lower the better. In sentences, the text of the member names its mean."""

    LOSS = "loss"
    LOGISTIC_LOSS = "logistic loss of the margin"
    ERROR_RATE = "share of wrongly ranked pairs"
    ERROR_RATE_OVER_CHAMPIONS_REFERENCE = "share of pairs ranked wrongly over the champion's reference"

    @property
    def why(self) -> str:
        match self:
            case GateMetric.LOSS | GateMetric.LOGISTIC_LOSS:
                return ""
            case GateMetric.ERROR_RATE:
                return "the champion was evaluated with another loss or template, so losses cannot be compared; "
            case GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE:
                return "the champion was evaluated with another reference, so losses cannot be compared; "


@dataclass(frozen=True)
class PairedScores:
    """The values of `measure` by pair, for a candidate and for the champion, if there is one.

    `prompts` maps pairs to prompts. `leaked` names shared pairs with prompts in the earlier training data of either policy.
    """

    measure: GateMetric
    candidate: Values
    champion: Values | None = None
    prompts: Prompts = field(default_factory=dict)
    leaked: Set[str] = frozenset()

    @property
    def shared(self) -> Set[str]:
        return frozenset() if self.champion is None else self.candidate.keys() & self.champion.keys()


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference of two values on the same pairs, with its standard error."""

    pairs: int
    prompts: int
    mean: float
    standard_error: float


def paired_difference(values: Values, others: Values, prompts: Prompts = _OWN_PROMPTS) -> PairedDifference:
    """Return `values` minus `others` on the pairs of both. These pairs must have two prompts at least."""
    gains = {pair: values[pair] - others[pair] for pair in sorted(values.keys() & others.keys())}
    mean = statistics.fmean(gains.values())
    prompt_sums: dict[str, float] = defaultdict(float)
    for pair, gain in gains.items():
        prompt_sums[prompts.get(pair, pair)] += gain - mean
    count = len(prompt_sums)
    squares = math.fsum(total**2 for total in prompt_sums.values())
    return PairedDifference(len(gains), count, mean, math.sqrt(count / (count - 1) * squares) / len(gains))


def count_prompts(pairs: Collection[str], prompts: Prompts) -> int:
    return len({prompts.get(pair, pair) for pair in pairs})


@dataclass(frozen=True)
class Decision:
    """`reasons` are sentences for users; `figures` are the numbers behind them."""

    promote: bool
    reasons: list[str]
    figures: dict[str, float]


def floor_problems(metrics: Mapping[str, float], gate: Gate, figures: dict[str, float]) -> list[str]:
    """Return which floors of the recipe's `gate` the metrics of an evaluation miss. Add the compared values to `figures`."""
    reasons = []
    if gate.min_accuracy is not None:
        reasons += _below(gate.min_accuracy, metrics["eval/rewards/accuracies"], figures)
    for name, floor in gate.min_accuracy_of.items():
        reasons += _below(floor, metrics.get(f"eval/sources/{name}/rewards/accuracies"), figures, f" of {name}")
    return reasons


def values_problem(values: Values, whose: str) -> list[str]:
    if not values:
        return [f"the {whose} has no held-out losses"]
    broken = sum(not math.isfinite(value) for value in values.values())
    return [f"{broken} of the {whose}'s {len(values)} held-out losses are not finite"] if broken else []


def _below(floor: float, accuracy: float | None, figures: dict[str, float], of: str = "") -> list[str]:
    """Return why `accuracy` misses the floor, if it does; None means no pairs. `of` names a source, by default all pairs."""
    figures[f"min_accuracy{of}"] = floor
    if accuracy is None:
        return [f"no held-out pair{of} is left to measure the accuracy; the recipe's floor is {floor:.4g}"]
    figures[f"accuracy{of}"] = accuracy
    # NaN must not pass.
    return (
        []
        if accuracy >= floor
        else [f"held-out accuracy{of} {accuracy:.4g} is below the recipe's floor of {floor:.4g}"]
    )
