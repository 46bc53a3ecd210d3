"""Asset checks: conditions on the details in an artifact's manifest, or on its lineage.

A failed blocking check stops the assets downstream. The body of an asset reports its checks, so every materialization has them.
"""

import math

import dagster as dg

from assets.bodies.policy_difference import PolicyDifference
from assets.comparison.disclosure import Meter
from assets.comparison.evidence import count_seen
from assets.comparison.leakage import Leakage
from assets.pipeline.pipeline import Pipeline
from training.contract.config.recipe import Evaluation
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import (
    EvaluationDetails,
    LogProbsDetails,
    PairsDetails,
    PolicyDetails,
    PrequentialDetails,
    RowsDetails,
)
from training.contract.protocol.votes import VOTES
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store

QUARANTINE = "quarantine_within_limit"
RESPONSES = "no_empty_response"
PREFIX = "prompt_is_token_prefix"
COMPLETE = "template_leaves_nothing_out"
SPLITS = "no_prompt_in_both_splits"
FRESH = "fresh_and_finite"
COVERAGE = "complete_and_finite"
STEP0 = "step0_loss_at_zero_margin"
REWARDS = "rewards_finite"
ACCURACY = "held_out_accuracy_above_chance"
LEAKAGE = "no_held_out_prompt_trained_on_before"
DIFFERENCE = "policy_differs_from_reference"
DISCLOSURE = "disclosure"

_NOT_INSIDE = 0.05  # the probability that a 95% interval misses

_CHECKS = {
    AssetName.RAW_PREFERENCES: {QUARANTINE: "The share of quarantined rows is at most `data.max_quarantined`."},
    AssetName.TOKENIZED_PAIRS: {
        RESPONSES: "Every response has at least one trained token.",
        PREFIX: "The rendered prompt is a token prefix of prompt and response; the share of other pairs is within the limit.",
        COMPLETE: "The template accepts a pair and writes all of it; the share of other pairs is within the limit.",
        SPLITS: "No prompt is in both the training and the validation split.",
    },
    AssetName.REFERENCE_LOGPROBS: {
        COVERAGE: "Every pair has a finite reference log-prob for both responses, with the token counts of its masks.",
    },
    AssetName.PREQUENTIAL_SCORES: {
        FRESH: "No scored prompt is in data that the policy has seen, and every score is finite.",
    },
    "policy": {
        STEP0: "Before the first update, the loss equals the loss at zero margin: reference model and log-probs agree.",
        REWARDS: "The rewards of every training step are finite.",
    },
    "evaluation": {
        ACCURACY: "The 95% confidence interval of the held-out accuracy lies above one half.",
        LEAKAGE: "No earlier policy, from which this one started, was trained on a held-out prompt.",
        DIFFERENCE: "On held-out pairs, log-probs, margins or sampled answers of the policy differ from the reference model's.",
        DISCLOSURE: "With `disclosure: votes`, all votes so far bound the bias of a figure by `evaluation.disclosure_budget`.",
    },
}
_WARNINGS = {FRESH, ACCURACY, LEAKAGE, DIFFERENCE, DISCLOSURE}


def check_specs(pipeline: Pipeline, asset: str) -> list[dg.AssetCheckSpec]:
    """Return the declarations of the checks on `asset`."""
    return [
        dg.AssetCheckSpec(name, asset=pipeline.key(asset), description=description, blocking=name not in _WARNINGS)
        for name, description in _CHECKS.get(asset, {}).items()
    ]


def quarantine(artifact: Artifact[RowsDetails], limit: float) -> dg.AssetCheckResult:
    counts = artifact.details.counts
    rows_read, quarantined = counts.rows_read, counts.quarantined
    share = quarantined / rows_read if rows_read else 1.0
    description = (
        f"{quarantined:,} of {rows_read:,} rows ({share:.1%}) are in quarantine, at most {limit:.1%} are allowed by "
        "data.max_quarantined"
    )
    for row in artifact.details.quarantine_examples[:1]:
        first = f"{row.source}, line {row.line}: {row.reason}, {row.detail}"
        description += f"; they are in {artifact.folder / 'quarantine.parquet'} with the reasons, the first is {first}"
    return _result(QUARANTINE, share <= limit, description, share=share, limit=limit)


def responses(artifact: Artifact[PairsDetails]) -> dg.AssetCheckResult:
    empty = artifact.details.empty_masks
    return _result(RESPONSES, empty == 0, f"{empty:,} responses have no trained token", empty_masks=empty)


def prefix(artifact: Artifact[PairsDetails], limit: float) -> dg.AssetCheckResult:
    violations, pairs = artifact.details.prefix_violations, artifact.details.counts.pairs
    share = violations / max(1, violations + pairs)
    description = (
        f"for {violations:,} pairs ({share:.1%}) the prompt's tokens are not a prefix of prompt and response: the template "
        "renders a prompt with a response differently. They were left out, at most "
        f"{limit:.1%} are allowed by data.max_quarantined"
    )
    description += _first_example(artifact.details.first_prefix_violation)
    return _result(PREFIX, share <= limit, description, violations=violations)


def complete(artifact: Artifact[PairsDetails], limit: float) -> dg.AssetCheckResult:
    left_out, pairs = artifact.details.left_out, artifact.details.counts.pairs
    share = left_out / max(1, left_out + pairs)
    description = (
        f"{left_out:,} pairs ({share:.1%}) are refused by the chat template, or rendered without a part, or rendered with the "
        f"same text for assistant and tool messages. They were left out, at most {limit:.1%} are allowed by "
        "data.max_quarantined"
    )
    description += _first_example(artifact.details.first_left_out)
    return _result(COMPLETE, share <= limit, description, left_out=left_out)


def _first_example(text: str) -> str:
    """Return the job's text about the first faulty pair; empty without one, and for artifacts of earlier versions."""
    return f". The first: {text}" if text else ""


def splits(artifact: Artifact[PairsDetails]) -> dg.AssetCheckResult:
    shared = artifact.details.shared_prompts
    description = f"{shared:,} prompts are in both splits"
    if shared:
        description += (
            ": they differ in the data, but the chat template writes the same text for them, for example with `| trim`. Make "
            "them equal in the data, or remove one of them"
        )
    description += _first_example(artifact.details.first_shared_prompt)
    return _result(SPLITS, shared == 0, description, shared_prompts=shared)


def coverage(artifact: Artifact[LogProbsDetails], pairs: int) -> dg.AssetCheckResult:
    rows, finite = artifact.details.pairs, artifact.details.finite
    description = f"{rows:,} rows for {pairs:,} pairs, {finite:,} of them finite"
    return _result(COVERAGE, rows == pairs == finite, description, rows=rows, finite=finite)


def fresh(store: Store, artifact: Artifact[PrequentialDetails]) -> dg.AssetCheckResult:
    """Compare the prompts in the table of scores with the rows that each policy has seen."""
    pairs = sum(found.pairs for found in artifact.details.policies)
    finite = sum(found.finite for found in artifact.details.policies)
    seen = sum(count_seen(store, artifact).values())
    description = f"{pairs:,} scores, {finite:,} of them finite, {seen:,} of prompts that their policy has seen"
    return _result(FRESH, pairs == finite and not seen, description, scores=pairs, seen=seen)


def step0(artifact: Artifact[PolicyDetails]) -> dg.AssetCheckResult:
    details = artifact.details
    loss, expected, allowed = details.step0_loss, details.step0_expected, details.step0_allowed
    description = f"the loss before the first update is {loss:.6f}, expected {expected:.6f} within {allowed:.6f}"
    return _result(STEP0, abs(loss - expected) <= allowed, description, loss=loss, expected=expected)


def rewards(artifact: Artifact[PolicyDetails]) -> dg.AssetCheckResult:
    finite = artifact.details.rewards_finite
    return _result(REWARDS, finite, "all finite" if finite else "a step has rewards that are not finite numbers")


def accuracy(artifact: Artifact[EvaluationDetails]) -> dg.AssetCheckResult:
    if artifact.details.accuracy_votes is not None:
        return _accuracy_by_votes(artifact.details.accuracy_votes)
    low, high = artifact.details.interval
    value = artifact.details.metrics["eval/rewards/accuracies"]
    description = f"held-out accuracy {value:.3f}, 95% interval {low:.3f} to {high:.3f}"
    return _result(ACCURACY, low > 0.5, description, accuracy=value, low=low, high=high)


def _accuracy_by_votes(value: float) -> dg.AssetCheckResult:
    """Return the check on votes alone. They are independent draws, so the interval of their mean is Hoeffding's."""
    low = value - math.sqrt(math.log(2 / _NOT_INSIDE) / (2 * VOTES))
    description = f"accuracy {value:.2f} by {VOTES} votes, with 95% confidence at least {max(0.0, low):.2f}"
    return _result(ACCURACY, low > 0.5, description, accuracy=value, low=low)


def leakage(found: Leakage, pairs: int) -> dg.AssetCheckResult:
    leaked = len(found.pairs)
    description = "the policy did not start from another policy of this store"
    if found.policies:
        policies = ", ".join(map(short, found.policies))
        description = (
            f"{leaked:,} of {pairs:,} held-out pairs have prompts from the training data of earlier policies, from which this "
            f"one started ({policies})"
        )
    if leaked:
        description += (
            ": losses, accuracies and floors look better than they are. The gate leaves these pairs out. To avoid them, set "
            "`training.start_from: reference`, or a `reference.model` that was not trained on them"
        )
    if found.unknown:
        description += f"; the training data of {', '.join(map(short, found.unknown))} are missing from this store"
    return _result(LEAKAGE, not leaked, description, leaked_pairs=leaked)


def differs(found: PolicyDifference) -> dg.AssetCheckResult:
    description = str(found)
    if found.is_negligible:
        description = (
            f"the policy hardly differs from the reference model: {description}. It took too few steps, or its learning rate "
            "is too low"
        )
    changed = {"changed_samples": found.changed / found.samples} if found.samples else {}
    return _result(DIFFERENCE, not found.is_negligible, description, shift=found.shift, margin=found.margin, **changed)


def difference_hidden() -> dg.AssetCheckResult:
    """Return the check for an evaluation by votes, whose pairs and answers are hidden."""
    return _result(DIFFERENCE, True, "not measured, because `evaluation.disclosure: votes` hides the held-out pairs")


def disclosure(meter: Meter, evaluation: Evaluation) -> dg.AssetCheckResult:
    """`evaluation`: the section of the recipe."""
    budget, is_unbounded = evaluation.disclosure_budget, math.isinf(meter.nats)
    found = "unbounded" if is_unbounded else f"{meter.bound:.3f} after {meter.nats:.3g} nats"
    description = f"the bound on the bias of a figure of {meter.pairs:,} held-out prompts is {found}"
    if evaluation.is_exact:
        return _result(DISCLOSURE, True, f"{description}, because exact figures are shown")
    passed = meter.bound <= budget
    if not passed:
        description += f", above evaluation.disclosure_budget {budget:g}"
        description += " because exact figures were shown" if is_unbounded else ""
        description += ": hold out new pairs, none with a prompt that was held out before, or more pairs from the start"
    figures = {} if is_unbounded else {"nats": meter.nats, "bound": meter.bound}
    return _result(DISCLOSURE, passed, description, budget=budget, **figures)


def _result(name: str, passed: bool, description: str, **figures: float) -> dg.AssetCheckResult:
    severity = dg.AssetCheckSeverity.WARN if name in _WARNINGS else dg.AssetCheckSeverity.ERROR
    return dg.AssetCheckResult(
        passed=passed, check_name=name, severity=severity, description=description, metadata=figures
    )
