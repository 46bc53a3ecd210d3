"""The gate's decision as users may see it (`evaluation.disclosure`)."""

from assets.bodies.release.candidate import Candidate
from assets.comparison.champion import score_against_champion
from assets.comparison.votes import undisclosed, win_over_champion
from model_registry.gate.scores import Decision
from model_registry.model_version import Version
from training.contract.protocol.artifacts import EVALUATION, AssetName


def shown_decision(candidate: Candidate, version: Version, champion: Version | None, decision: Decision) -> Decision:
    """Return `decision` as it is, or with votes, only its outcome and the two figures. Raise as the gate does.

    A version that is champion already keeps the reasons of its first decision.
    """
    evaluation = candidate.artifact(EVALUATION)
    details = evaluation.details
    if details.accuracy_votes is None or (champion is not None and champion.number == version.number):
        return decision
    if champion is None:
        return undisclosed(decision, details, None)
    rows = candidate.lineage[AssetName.RAW_PREFERENCES]
    pairs = score_against_champion(candidate.context, evaluation, rows, champion)
    return undisclosed(decision, details, win_over_champion(candidate.context, evaluation, rows, pairs))
