"""What a user may see of an evaluation: exact figures, or two figures from votes (`evaluation.disclosure`).

Both modes record what is shown in the meter (disclosure.py). The gate compares exact scores in either mode. With votes, its
decision is shown without them.
"""

from collections.abc import Iterable
from dataclasses import replace

from assets.comparison.disclosure import Disclosed, DisclosureLog, Meter
from assets.execution.asset_context import AssetContext
from assets.pipeline.pipeline import Pipeline
from model_registry.gate.scores import Decision, PairedScores, count_prompts
from model_registry.model_version import Version
from training.contract.errors import UsageError
from training.contract.protocol.artifacts import RAW_PREFERENCES, AssetName
from training.contract.protocol.details import EvaluationDetails
from training.contract.protocol.votes import ACCURACY_VOTES, VOTES, WIN_VOTES, vote
from training.contract.store.artifact import Artifact

WIN_TAG = "pedigree.win_votes"


def check_exact(pipeline: Pipeline, request: str) -> None:
    """Raise UsageError if the recipe hides held-out pairs. `request`: what the user asked for, as a subject."""
    if not pipeline.recipe.evaluation.is_exact:
        raise UsageError(
            f"{request} would reveal held-out pairs, and {pipeline.name} has `evaluation.disclosure: votes`, so that they stay "
            "unknown and can judge more policies; set `evaluation.disclosure: exact` to see them",
            "held-out-hidden",
        )


def record_training(context: AssetContext, key: str, tokenized_pairs: str) -> None:
    """Record that users may see the held-out metrics of the training of the policy `key`, unless they are hidden."""
    if context.pipeline.recipe.evaluation.is_exact:
        _record(context, tokenized_pairs, of=key, figure="exact")


def record_evaluation(context: AssetContext, evaluation: Artifact[EvaluationDetails]) -> Meter:
    """Record what is shown of `evaluation`. Return the meter of its pairs. Raise StoreError if the meter's file is damaged.

    The latest evaluation of a version of Pedigree without the meter was shown with exact figures.
    """
    details, pairs = evaluation.details, evaluation.derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint
    latest = context.history.latest(AssetName.EVALUATION)
    if latest.fingerprint is not None and "disclosed_nats" not in latest.metadata:
        _record(context, pairs, of=latest.fingerprint, figure="exact")
    if details.accuracy_votes is None:
        held_out = _record(context, pairs, of=evaluation.fingerprint, figure="exact")
        return log_of(context).meter(held_out, max(1, details.independent_pairs))
    value, independent = details.accuracy_votes, details.independent_pairs
    held_out = _record(context, pairs, of=evaluation.fingerprint, figure="accuracy", pairs=independent, value=value)
    return log_of(context).meter(held_out, independent)


def _record(context: AssetContext, tokenized_pairs: str, **shown: object) -> str:
    """Add a line to the meter. Return the fingerprint of the `raw_preferences` with the held-out pairs."""
    derivation = context.history.derivation(AssetName.TOKENIZED_PAIRS, tokenized_pairs)
    held_out = derivation.inputs[AssetName.RAW_PREFERENCES].fingerprint
    raw_preferences = context.services.store.open(RAW_PREFERENCES, held_out, hashes=False)
    log_of(context).add(Disclosed.model_validate({**shown, "held_out": held_out}), raw_preferences)
    return held_out


def log_of(context: AssetContext) -> DisclosureLog:
    return DisclosureLog(context.services.home, context.pipeline.family)


def win_over_champion(
    context: AssetContext, evaluation: Artifact[EvaluationDetails], raw_preferences: str, pairs: PairedScores
) -> float | None:
    """Return the win over the champion by votes of a candidate's `evaluation`, made from `raw_preferences`.

    None if exact figures are shown, and as in `win_by_votes`. `pairs`: the scores that the gate compares.
    """
    if evaluation.details.accuracy_votes is None:
        return None
    services, recipe = context.services, context.pipeline.recipe
    versions = services.registry.versions(recipe.release.model_name)
    rows = services.store.open(RAW_PREFERENCES, raw_preferences, hashes=False)
    return win_by_votes(log_of(context), versions, evaluation, rows, pairs)


def win_by_votes(
    log: DisclosureLog,
    versions: Iterable[Version],
    evaluation: Artifact[EvaluationDetails],
    raw_preferences: Artifact,
    pairs: PairedScores,
) -> float | None:
    """Return the candidate's win over the champion by votes. It is drawn once for each evaluation, and recorded in `log`.

    None without a champion or shared pairs. `versions`: all versions of the model; one with the same evaluation has the
    figure in WIN_TAG. As in the gate, pairs with leakage do not count.
    """
    shared = sorted(pairs.shared - pairs.leaked)
    if pairs.champion is None or not shared:
        return None
    of = evaluation.fingerprint
    same = (version for version in versions if version.fingerprint_of(AssetName.EVALUATION) == of)
    stored = next((version.tags[WIN_TAG] for version in same if WIN_TAG in version.tags), None)
    known = log.win(of) if stored is None else float(stored)
    if known is not None:
        return known
    scores = [_win(pairs.candidate[pair], pairs.champion[pair]) for pair in shared]
    value = vote(scores, WIN_VOTES, evaluation.derivation.key)
    independent = count_prompts(shared, pairs.prompts)
    line = Disclosed(of=of, figure="win", held_out=raw_preferences.fingerprint, pairs=independent, value=value)
    log.add(line, raw_preferences)
    return value


def _win(candidate: float, champion: float) -> float:
    """Return 1 for a lower value of the candidate, 0.5 for equal ones, else 0. A value that is not a number wins nothing."""
    if candidate == champion:
        return 0.5
    return float(candidate < champion)


def undisclosed(decision: Decision, details: EvaluationDetails, win: float | None) -> Decision:
    """Return `decision` for users: as it is, or with votes, only its outcome and the figures from votes.

    `details`: of the candidate's evaluation. `win`: the win over the champion by votes, if there is one.
    """
    if details.accuracy_votes is None:
        return decision
    figures = {ACCURACY_VOTES: details.accuracy_votes, **({} if win is None else {WIN_VOTES: win})}
    outcome = "the gate promoted it" if decision.promote else "the gate did not promote it"
    over = "" if win is None else f" and a win over the champion of {win:.2f}"
    reason = f"{outcome}; {VOTES} votes give an accuracy of {details.accuracy_votes:.2f}{over}"
    return replace(decision, reasons=[reason], figures=figures)


def win_tags(decision: Decision) -> dict[str, str]:
    """Return the tag of a version with its win over the champion by votes; nothing without one."""
    return {WIN_TAG: str(decision.figures[WIN_VOTES])} if WIN_VOTES in decision.figures else {}


def win_figure(version: Version) -> dict[str, float]:
    """Return the win over the champion in the tags of `version`, by the name of its metric; nothing without one."""
    return {WIN_VOTES: float(version.tags[WIN_TAG])} if WIN_TAG in version.tags else {}
