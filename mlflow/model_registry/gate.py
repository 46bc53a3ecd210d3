"""The gate: whether a candidate becomes champion. A pure decision over held-out losses, with its reasons and figures.

The same held-out pairs judge every retraining, so plain "lower loss wins" would, over the weeks, select models that
fit the noise of those pairs. The parameter-free Ladder (Blum and Hardt 2015, "The Ladder: A Reliable Leaderboard for
Machine Learning Competitions") answers this: the best score changes only when the new one is better by more than one
standard error of the paired difference, s / sqrt(n) with s the sample standard deviation, and the reported score is
rounded to a multiple of 1/n. The error of the best score then grows with the logarithm of the number of submissions and
not with a power of it.

Two losses are compared for the same pair only, so data may grow between champion and candidate. Both must have been
computed with the same loss settings, reference and tokens; where they were not, the caller gives what can still be compared,
1 for a pair that is ranked wrongly and 0 for any other. The comparison uses the champion's exact mean, not its rounded
one: else a copy of the champion could pass by the rounding alone.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from training.contract.recipe import Gate

# Below this a standard error says too little about itself to decide anything.
MIN_PAIRS = 10

Losses = Mapping[str, float]


class Measure(StrEnum):
    """What of a pair is compared, the lower the better; in sentences the value stands for its mean."""

    LOSS = "loss"
    ERROR_RATE = "share of wrongly ranked pairs"

    @property
    def why(self) -> str:
        if self is Measure.LOSS:
            return ""
        return "the champion's losses are of another loss, reference or template and cannot be compared; "


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference of two values on the same pairs, with its standard error."""

    pairs: int
    mean: float
    standard_error: float


def paired_difference(values: Losses, others: Losses) -> PairedDifference:
    """`values` minus `others` on the pairs that both have, which must be two at least."""
    gains = [values[pair] - others[pair] for pair in sorted(values.keys() & others.keys())]
    return PairedDifference(len(gains), statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains)))


@dataclass(frozen=True)
class Decision:
    """`reasons` are sentences for people; `figures` the numbers they rest on."""

    promote: bool
    reasons: list[str]
    figures: dict[str, float]


def decide(
    candidate: Losses, champion: Losses | None, measure: Measure, *, metrics: Mapping[str, float], gate: Gate
) -> Decision:
    """Compare what `measure` says of a candidate with the champion's, by the pair's identity.

    `metrics` are those of the candidate's evaluation, with the accuracies; below a floor of the recipe's `gate` nothing is
    promoted. If there is no champion, a candidate that is below none is promoted.
    """
    accuracy = metrics["eval/rewards/accuracies"]
    figures = {"candidate_pairs": float(len(candidate)), "accuracy": accuracy}
    reasons = _unfit(candidate, "candidate")
    if gate.min_accuracy is not None:
        reasons += _below(gate.min_accuracy, accuracy, figures)
    for name, floor in gate.min_accuracy_of.items():
        reasons += _below(floor, metrics.get(f"eval/sources/{name}/rewards/accuracies"), figures, f" of {name}")
    if champion is not None:
        beaten, compared = _compare(candidate, champion, measure, figures)
        return Decision(beaten and not reasons, [*reasons, *compared], figures)
    if reasons:
        return Decision(False, reasons, figures)
    figures[f"candidate_{measure.name.lower()}"] = rounded(statistics.fmean(candidate.values()), len(candidate))
    return Decision(True, ["there was no champion before"], figures)


def rounded(score: float, count: int) -> float:
    """The score as it may be reported: the nearest multiple of 1/count."""
    return round(score * count) / count


def _unfit(losses: Losses, whose: str) -> list[str]:
    if not losses:
        return [f"the {whose} has no held-out losses"]
    broken = sum(not math.isfinite(loss) for loss in losses.values())
    return [f"{broken} of the {whose}'s {len(losses)} held-out losses are not finite"] if broken else []


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


def _compare(
    candidate: Losses, champion: Losses, measure: Measure, figures: dict[str, float]
) -> tuple[bool, list[str]]:
    """Whether the candidate is better by more than one standard error on the pairs both have, and the reason."""
    shared = sorted(candidate.keys() & champion.keys())
    figures |= {"champion_pairs": float(len(champion)), "shared_pairs": float(len(shared))}
    if len(shared) < MIN_PAIRS:
        few = f"only {len(shared)} held-out pairs are shared with the champion; {MIN_PAIRS} are needed"
        return False, [f"{few}: compare them yourself, and point the alias champion at the better one in MLflow"]
    ours, theirs = {pair: candidate[pair] for pair in shared}, {pair: champion[pair] for pair in shared}
    if broken := _unfit(ours, "candidate") + _unfit(theirs, "champion"):
        return False, broken
    better = paired_difference(theirs, ours)
    gain, error = better.mean, better.standard_error
    figures |= {
        f"candidate_{measure.name.lower()}": rounded(statistics.fmean(ours.values()), len(shared)),
        f"champion_{measure.name.lower()}": rounded(statistics.fmean(theirs.values()), len(shared)),
        "gain": gain,
        "standard_error": error,
    }
    found = f"{abs(gain):.4g} {'lower' if gain > 0 else 'higher'} than" if gain else "the same as"
    return gain > error, [
        f"{measure.why}on {len(shared)} shared pairs the {measure} is {found} the champion's; "
        f"to become champion it must be lower by more than one standard error, {error:.4g}"
    ]
