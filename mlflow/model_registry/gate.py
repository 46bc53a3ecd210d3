"""The gate: whether a candidate becomes champion. A pure decision over held-out losses, with its reasons and figures.

The same held-out pairs judge every retraining, so plain "lower loss wins" would, over the weeks, select models that
fit the noise of those pairs. The parameter-free Ladder (Blum and Hardt 2015, "The Ladder: A Reliable Leaderboard for
Machine Learning Competitions") answers this: the best score changes only when the new one is better by more than one
standard error of the paired difference, and the reported score is rounded to a multiple of 1/n. The error of the best score
then grows with the logarithm of the number of submissions and not with a power of it. That holds of what the gate decides;
whoever tunes by hand on the exact losses of each evaluation, which are shown as well, fits the held-out pairs all the same.

The standard error is s / sqrt(n), with s the sample standard deviation, where each pair has a prompt of its own. Pairs of one
prompt are alike, so it is the one for clusters (Miller 2024, "Adding Error Bars to Evals"), with the factor G / (G - 1) for
the G prompts, which gives the former where there is no cluster.

Two losses are compared for the same pair only, so data may grow between champion and candidate. Both must have been
computed with the same loss settings, reference and tokens; where they were not, the caller gives what can still be compared,
1 for a pair that is ranked wrongly and 0 for any other, over one reference if it can: over its own, the weaker the reference
a policy was trained from, the more pairs it would rank rightly. The comparison uses the champion's exact mean, not its rounded
one: else a copy of the champion could pass by the rounding alone.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from training.contract.config.recipe import Gate

# Below this a standard error says too little about itself to decide anything.
MIN_PROMPTS = 10
_ROUNDING = 1e-9

Values = Mapping[str, float]  # by pair
Prompts = Mapping[str, str]  # by pair; one that is not in it has a prompt of its own
_OWN_PROMPTS: Prompts = {}


class Measure(StrEnum):
    """What of a pair is compared, the lower the better; in sentences the value stands for its mean."""

    LOSS = "loss"
    ERROR_RATE = "share of wrongly ranked pairs"
    ERROR_RATE_OVER_CHAMPIONS_REFERENCE = "share of pairs ranked wrongly over the champion's reference"

    @property
    def why(self) -> str:
        match self:
            case Measure.LOSS:
                return ""
            case Measure.ERROR_RATE:
                return "the champion's losses are of another loss or template and cannot be compared; "
            case Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE:
                return "the champion's losses are over another reference and cannot be compared; "


@dataclass(frozen=True)
class PairedScores:
    """What `measure` says of the pairs of a candidate and of the champion, if there is one, and which prompts they have.

    `leaked` names shared pairs whose prompts one of both was trained on before.
    """

    measure: Measure
    candidate: Values
    champion: Values | None = None
    prompts: Prompts = field(default_factory=dict)
    leaked: Set[str] = frozenset()

    @property
    def shared(self) -> Set[str]:
        return frozenset() if self.champion is None else self.candidate.keys() & self.champion.keys()


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference of two values on the same pairs, which have so many prompts, with its standard error."""

    pairs: int
    prompts: int
    mean: float
    standard_error: float


def paired_difference(values: Values, others: Values, prompts: Prompts = _OWN_PROMPTS) -> PairedDifference:
    """`values` minus `others` on the pairs that both have, which must be of two prompts at least."""
    gains = {pair: values[pair] - others[pair] for pair in sorted(values.keys() & others.keys())}
    mean = statistics.fmean(gains.values())
    of_prompts: dict[str, float] = defaultdict(float)
    for pair, gain in gains.items():
        of_prompts[prompts.get(pair, pair)] += gain - mean
    count = len(of_prompts)
    squares = math.fsum(total**2 for total in of_prompts.values())
    return PairedDifference(len(gains), count, mean, math.sqrt(count / (count - 1) * squares) / len(gains))


def count_prompts(pairs: Collection[str], prompts: Prompts) -> int:
    return len({prompts.get(pair, pair) for pair in pairs})


@dataclass(frozen=True)
class Decision:
    """`reasons` are sentences for people; `figures` the numbers they rest on."""

    promote: bool
    reasons: list[str]
    figures: dict[str, float]


def decide(pairs: PairedScores, metrics: Mapping[str, float], gate: Gate) -> Decision:
    """Compare the candidate with the champion, by the pair's identity, on all shared pairs that have not leaked.

    `metrics` are those of the candidate's evaluation, with the accuracies; below a floor of the recipe's `gate` nothing is
    promoted. Without a champion, a candidate that misses no floor is promoted.
    """
    accuracy = metrics["eval/rewards/accuracies"]
    figures = {"candidate_pairs": float(len(pairs.candidate)), "accuracy": accuracy}
    reasons = _values_problem(pairs.candidate, "candidate")
    if gate.min_accuracy is not None:
        reasons += _below(gate.min_accuracy, accuracy, figures)
    for name, floor in gate.min_accuracy_of.items():
        reasons += _below(floor, metrics.get(f"eval/sources/{name}/rewards/accuracies"), figures, f" of {name}")
    if pairs.champion is not None:
        beaten, compared = _compare(pairs, pairs.champion, figures)
        return Decision(beaten and not reasons, [*reasons, *compared], figures)
    if reasons:
        return Decision(False, reasons, figures)
    figures |= _score(pairs.measure, "candidate", pairs.candidate)
    return Decision(True, ["there was no champion before"], figures)


def _score(measure: Measure, whose: str, values: Values) -> dict[str, float]:
    return {f"{whose}_{measure.name.lower()}": rounded(statistics.fmean(values.values()), len(values))}


def rounded(score: float, count: int) -> float:
    """The score as it may be reported: the nearest multiple of 1/count."""
    return round(score * count) / count


def _values_problem(values: Values, whose: str) -> list[str]:
    if not values:
        return [f"the {whose} has no held-out losses"]
    broken = sum(not math.isfinite(value) for value in values.values())
    return [f"{broken} of the {whose}'s {len(values)} held-out losses are not finite"] if broken else []


def _below(floor: float, accuracy: float | None, figures: dict[str, float], of: str = "") -> list[str]:
    """Why `accuracy`, None where there are no pairs, is below the floor; `of` says whose it is, if not that of all pairs."""
    figures[f"min_accuracy{of}"] = floor
    if accuracy is None:
        return [f"no held-out pair{of} is left to tell whether the accuracy is at least {floor:.4g}"]
    figures[f"accuracy{of}"] = accuracy
    # Written so that NaN does not pass.
    return (
        []
        if accuracy >= floor
        else [f"held-out accuracy{of} {accuracy:.4g} is below the recipe's floor of {floor:.4g}"]
    )


def _compare(pairs: PairedScores, champion: Values, figures: dict[str, float]) -> tuple[bool, list[str]]:
    """Whether the candidate is better by more than one standard error on the pairs both have, and the reason."""
    measure, leaked = pairs.measure, pairs.leaked
    shared = sorted(pairs.shared - leaked)
    count = count_prompts(shared, pairs.prompts)
    of_prompts = f" of {count} prompts" if count < len(shared) else ""
    figures |= {"champion_pairs": float(len(champion)), "shared_pairs": float(len(shared))}
    without = ""
    if leaked:
        figures["leaked_pairs"] = float(len(leaked))
        without = f", without {len(leaked)} whose prompts one of both was trained on before,"
    if count < MIN_PROMPTS:
        return False, [
            f"only {len(shared)} held-out pairs{of_prompts}{without} are shared with the champion; {MIN_PROMPTS} prompts are "
            "needed: compare them yourself, and point the alias champion at the better one in MLflow"
        ]
    ours, theirs = ({pair: values[pair] for pair in shared} for values in (pairs.candidate, champion))
    if broken := _values_problem(ours, "candidate") + _values_problem(theirs, "champion"):
        return False, broken
    better = paired_difference(theirs, ours, pairs.prompts)
    gain, error = better.mean, better.standard_error
    figures |= _score(measure, "candidate", ours) | _score(measure, "champion", theirs)
    figures |= {"gain": gain, "standard_error": error}
    found = f"{abs(gain):.4g} {'lower' if gain > 0 else 'higher'} than" if gain else "the same as"
    # The one pair in which two error rates differ is one standard error exactly, and not decided by how floats round.
    return gain > error * (1 + _ROUNDING), [
        f"{measure.why}on {len(shared)} shared pairs{of_prompts}{without} the {measure} is {found} the champion's; "
        f"to become champion it must be lower by more than one standard error, {error:.4g}"
    ]
