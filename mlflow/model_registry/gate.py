"""The gate decides whether a candidate becomes champion: a pure function of held-out losses, with reasons and figures.

The same held-out pairs judge every retraining. A rule "the lower loss wins" would, over the weeks, select models for the noise
of these pairs. The parameter-free Ladder avoids it (Blum and Hardt 2015, "The Ladder: A Reliable Leaderboard for Machine
Learning Competitions"). The best score changes only if the new one is better by more than one standard error of the paired
difference, and the reported score is rounded to a multiple of 1/n. The error of the best score then grows with the logarithm
of the number of submissions, not with a power of it. This holds for the gate's decisions only: a user can still fit the
held-out pairs by tuning on the exact losses, which are shown as well.

If each pair has its own prompt, the standard error is s / sqrt(n), with s the sample standard deviation. Pairs with the same
prompt are alike. So we use the standard error for clusters (Miller 2024, "Adding Error Bars to Evals"), with the factor
G / (G - 1) for G prompts. Without clusters it equals the former.

Losses are compared pair by pair, so data may grow between champion and candidate. Both losses need the same loss settings,
reference and tokens. Otherwise the caller passes errors: 1 for a wrongly ranked pair, 0 for any other. If possible they are
over one reference: over its own, a policy ranks more pairs rightly the weaker its reference is. The comparison uses the
champion's exact mean. With the rounded one, a copy of the champion could pass by rounding alone.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from training.contract.config.release import Gate

# With fewer prompts, the standard error is too uncertain for a decision.
MIN_PROMPTS = 10
_ROUNDING = 1e-9

Values = Mapping[str, float]  # by pair
Prompts = Mapping[str, str]  # by pair; a pair without an entry has its own prompt
_OWN_PROMPTS: Prompts = {}


class GateMetric(StrEnum):
    """The compared value of a pair, the lower the better. In sentences, the text of the member names its mean."""

    LOSS = "loss"
    ERROR_RATE = "share of wrongly ranked pairs"
    ERROR_RATE_OVER_CHAMPIONS_REFERENCE = "share of pairs ranked wrongly over the champion's reference"

    @property
    def why(self) -> str:
        match self:
            case GateMetric.LOSS:
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


def decide(pairs: PairedScores, metrics: Mapping[str, float], gate: Gate) -> Decision:
    """Compare the candidate with the champion, pair by pair, on all shared pairs without leakage.

    `metrics` come from the candidate's evaluation, with the accuracies. Below a floor of the recipe's `gate`, nothing is
    promoted. Without a champion, a candidate above all floors is promoted.
    """
    accuracy = metrics["eval/rewards/accuracies"]
    figures = {"candidate_pairs": float(len(pairs.candidate)), "accuracy": accuracy}
    reasons = _values_problem(pairs.candidate, "candidate")
    if gate.min_accuracy is not None:
        reasons += _below(gate.min_accuracy, accuracy, figures)
    for name, floor in gate.min_accuracy_of.items():
        reasons += _below(floor, metrics.get(f"eval/sources/{name}/rewards/accuracies"), figures, f" of {name}")
    if pairs.champion is not None:
        is_better, comparison = _compare(pairs, pairs.champion, figures)
        return Decision(is_better and not reasons, [*reasons, *comparison], figures)
    if reasons:
        return Decision(False, reasons, figures)
    figures |= _score(pairs.measure, "candidate", pairs.candidate)
    return Decision(True, ["there was no champion before"], figures)


def _score(measure: GateMetric, whose: str, values: Values) -> dict[str, float]:
    return {f"{whose}_{measure.name.lower()}": rounded(statistics.fmean(values.values()), len(values))}


def rounded(score: float, count: int) -> float:
    """Return the score as it may be reported: the nearest multiple of 1/count."""
    return round(score * count) / count


def _values_problem(values: Values, whose: str) -> list[str]:
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


def _compare(pairs: PairedScores, champion: Values, figures: dict[str, float]) -> tuple[bool, list[str]]:
    """Return whether the candidate is better by more than one standard error on the shared pairs, and the reason."""
    measure, leaked = pairs.measure, pairs.leaked
    shared = sorted(pairs.shared - leaked)
    count = count_prompts(shared, pairs.prompts)
    of_prompts = f" of {count} prompts" if count < len(shared) else ""
    figures |= {"champion_pairs": float(len(champion)), "shared_pairs": float(len(shared))}
    exclusion = ""
    if leaked:
        figures["leaked_pairs"] = float(len(leaked))
        exclusion = f", without {len(leaked)} with prompts from earlier training data of either policy,"
    if count < MIN_PROMPTS:
        return False, [
            f"only {len(shared)} held-out pairs{of_prompts}{exclusion} are shared with the champion; {MIN_PROMPTS} prompts are "
            "needed: compare both yourself, and point the alias champion at the better one in MLflow"
        ]
    candidate, champion_shared = ({pair: values[pair] for pair in shared} for values in (pairs.candidate, champion))
    if problems := _values_problem(candidate, "candidate") + _values_problem(champion_shared, "champion"):
        return False, problems
    difference = paired_difference(champion_shared, candidate, pairs.prompts)
    gain, error = difference.mean, difference.standard_error
    figures |= _score(measure, "candidate", candidate) | _score(measure, "champion", champion_shared)
    figures |= {"gain": gain, "standard_error": error}
    comparison = f"{abs(gain):.4g} {'lower' if gain > 0 else 'higher'} than" if gain else "the same as"
    # If two error rates differ in one pair, the gain is exactly one standard error; rounding of floats must not decide.
    return gain > error * (1 + _ROUNDING), [
        f"{measure.why}on {len(shared)} shared pairs{of_prompts}{exclusion} the {measure} is {comparison} the champion's; "
        f"to become champion it must be lower by more than one standard error, {error:.4g}"
    ]
