"""The gate's decision about a registered version, compared with the champion."""

from collections.abc import Iterator
from dataclasses import replace

from assets.bodies.release.candidate import Candidate
from assets.bodies.release.hypotheses import Hypotheses
from assets.comparison.champion import score_against_champion
from assets.comparison.paired_metrics import measure_pairs, rows_by_pair
from model_registry.gate.ladder import decide
from model_registry.gate.scores import Decision, GateMetric, PairedScores
from model_registry.model_version import REASONS_TAG, Version
from training.contract.protocol.artifacts import EVALUATION, AssetName

# The specs that may differ between two versions of one policy.
_SPECS_OF_A_POLICY = {
    AssetName.TOKENIZATION_SPEC: "tokenizer or chat template",
    AssetName.RELEASE_SPEC: "release spec (files of the tokenizer, generation settings or processors)",
}


def decide_release(
    candidate: Candidate, version: Version, champion: Version | None, hypotheses: Hypotheses | None
) -> Decision:
    """Return the gate's decision about `version`. `hypotheses`: of the gate `anytime`; None for `ladder`."""
    if champion is not None and champion.number == version.number:
        return Decision(True, [version.tags.get(REASONS_TAG, "it is the champion already")], {})
    if champion is None:
        return _keep_rolled_back(candidate, version, _decide_first(candidate))
    if hypotheses is None:
        decision = _decide_ladder(candidate, champion)
    elif candidate.registry.rolled_back(version) is not None:
        decision = Decision(False, [], {})  # it uses up no level
    else:
        decision = hypotheses.decide(version, champion)
    if version.weights == champion.weights and not decision.promote:
        reasons = list(_same_policy_reasons(version, champion))
        if hypotheses is not None and not reasons:
            reasons = ["its policy is the champion's"]
        decision = replace(decision, reasons=[*decision.reasons, *reasons])
    return _keep_rolled_back(candidate, version, decision)


def _decide_first(candidate: Candidate) -> Decision:
    evaluation = candidate.artifact(EVALUATION)
    losses = measure_pairs(GateMetric.LOSS, rows_by_pair(evaluation), {})
    gate = candidate.context.pipeline.recipe.release.gate
    return decide(PairedScores(GateMetric.LOSS, losses), evaluation.details.metrics, gate)


def _decide_ladder(candidate: Candidate, champion: Version) -> Decision:
    evaluation = candidate.artifact(EVALUATION)
    rows = candidate.lineage[AssetName.RAW_PREFERENCES]
    pairs = score_against_champion(candidate.context, evaluation, rows, champion)
    return decide(pairs, evaluation.details.metrics, candidate.context.pipeline.recipe.release.gate)


def _same_policy_reasons(version: Version, champion: Version) -> Iterator[str]:
    """Say how to use a candidate that has the champion's policy: no held-out pair can prefer it."""
    changed = [
        name
        for kind, name in _SPECS_OF_A_POLICY.items()
        if version.fingerprint_of(kind) != champion.fingerprint_of(kind)
    ]
    if changed:
        yield (
            f"its policy is the champion's, with another {changed[0]}: to use it, point the alias champion at it in MLflow"
        )


def _keep_rolled_back(candidate: Candidate, version: Version, decision: Decision) -> Decision:
    """Keep a policy that was rolled back from being promoted as another version, for example after an edit of the evaluation.

    The policy is recognized by its weights.
    """
    earlier = candidate.registry.rolled_back(version)
    if earlier is None:
        return decision
    reason = f"its policy is that of version {earlier}, which was rolled back"
    return replace(decision, promote=False, reasons=[reason, *decision.reasons])
