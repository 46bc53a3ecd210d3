"""The gate `ladder`: a pure function of held-out losses, with reasons and figures.

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

import statistics
from collections.abc import Mapping

from model_registry.gate.scores import (
    MIN_PROMPTS,
    Decision,
    GateMetric,
    PairedScores,
    Values,
    count_prompts,
    floor_problems,
    paired_difference,
    values_problem,
)
from training.contract.config.release import Gate

_ROUNDING = 1e-9


def decide(pairs: PairedScores, metrics: Mapping[str, float], gate: Gate) -> Decision:
    """Compare the candidate with the champion, pair by pair, on all shared pairs without leakage.

    `metrics` come from the candidate's evaluation, with the accuracies. Below a floor of the recipe's `gate`, nothing is
    promoted. Without a champion, a candidate above all floors is promoted.
    """
    accuracy = metrics["eval/rewards/accuracies"]
    figures = {"candidate_pairs": float(len(pairs.candidate)), "accuracy": accuracy}
    reasons = values_problem(pairs.candidate, "candidate") + floor_problems(metrics, gate, figures)
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
    if problems := values_problem(candidate, "candidate") + values_problem(champion_shared, "champion"):
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
