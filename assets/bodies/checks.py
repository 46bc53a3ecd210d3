"""What must hold of an artifact, judged by the details in its manifest, or by its lineage.

A blocking check that fails stops what follows.

The body of an asset reports its checks, so every materialization has them.
"""

import dagster as dg

from assets.bodies.policy_difference import PolicyDifference
from assets.comparison.leakage import Leakage
from assets.pipeline.pipeline import Pipeline
from training.contract.identity.fingerprint import short
from training.contract.store.store import Artifact

QUARANTINE = "quarantine_within_limit"
RESPONSES = "no_empty_response"
PREFIX = "prompt_is_token_prefix"
COMPLETE = "template_leaves_nothing_out"
SPLITS = "no_prompt_in_both_splits"
COVERAGE = "complete_and_finite"
STEP0 = "step0_loss_at_zero_margin"
REWARDS = "rewards_finite"
ACCURACY = "held_out_accuracy_above_chance"
LEAKAGE = "no_held_out_prompt_trained_on_before"
DIFFERENCE = "policy_differs_from_reference"

_CHECKS = {
    "raw_preferences": {QUARANTINE: "The share of quarantined rows is at most `data.max_quarantined`."},
    "tokenized_pairs": {
        RESPONSES: "Every response has at least one trained token.",
        PREFIX: "The rendered prompt is a token prefix of prompt and response; pairs where it is not stay within the limit.",
        COMPLETE: "The template takes a pair and writes all of it; pairs where it does not stay within the limit.",
        SPLITS: "No prompt is in both the training and the validation split.",
    },
    "reference_logprobs": {
        COVERAGE: "Every pair has a finite reference log-prob for both responses, with the token counts of its masks.",
    },
    "policy": {
        STEP0: "Before the first update the loss of the reference model is that of its own log-probs: model and table agree.",
        REWARDS: "The rewards of every training step are finite.",
    },
    "evaluation": {
        ACCURACY: "The 95% confidence interval of the held-out accuracy lies above one half.",
        LEAKAGE: "No policy that this one started from was trained on a held-out prompt.",
        DIFFERENCE: "On held-out pairs, log-probs, margins or sampled answers of the policy differ from the reference model's.",
    },
}
_WARNINGS = {ACCURACY, LEAKAGE, DIFFERENCE}


def check_specs(pipeline: Pipeline, asset: str) -> list[dg.AssetCheckSpec]:
    """The declarations of the checks on `asset`."""
    return [
        dg.AssetCheckSpec(name, asset=pipeline.key(asset), description=about, blocking=name not in _WARNINGS)
        for name, about in _CHECKS.get(asset, {}).items()
    ]


def quarantine(artifact: Artifact, limit: float) -> dg.AssetCheckResult:
    read, bad = artifact.details["counts"]["rows_read"], artifact.details["counts"]["quarantined"]
    share = bad / read if read else 1.0
    description = (
        f"{bad:,} of {read:,} rows ({share:.1%}) are in quarantine, at most {limit:.1%} are allowed by "
        "data.max_quarantined"
    )
    for first in artifact.details["quarantine_examples"][:1]:
        place = f"{first['source']}, line {first['line']}: {first['reason']}, {first['detail']}"
        description += f"; they are in {artifact.folder / 'quarantine.parquet'} with the reasons, the first is {place}"
    return _result(QUARANTINE, share <= limit, description, share=share, limit=limit)


def responses(artifact: Artifact) -> dg.AssetCheckResult:
    empty = artifact.details["empty_masks"]
    return _result(RESPONSES, empty == 0, f"{empty:,} responses have no trained token", empty_masks=empty)


def prefix(artifact: Artifact, limit: float) -> dg.AssetCheckResult:
    violations, pairs = artifact.details["prefix_violations"], artifact.details["counts"]["pairs"]
    share = violations / max(1, violations + pairs)
    description = (
        f"for {violations:,} pairs ({share:.1%}) the prompt's tokens do not begin prompt and response: the template renders it "
        f"differently once the answer follows. They were left out, at most {limit:.1%} are allowed by data.max_quarantined"
    )
    return _result(
        PREFIX, share <= limit, description + _first(artifact, "first_prefix_violation"), violations=violations
    )


def complete(artifact: Artifact, limit: float) -> dg.AssetCheckResult:
    left_out, pairs = artifact.details["left_out"], artifact.details["counts"]["pairs"]
    share = left_out / max(1, left_out + pairs)
    description = (
        f"{left_out:,} pairs ({share:.1%}) are refused by the chat template, or it leaves out a part of theirs, or does not "
        f"tell what the assistant says from what tools say. They were left out, at most {limit:.1%} are allowed by "
        "data.max_quarantined"
    )
    return _result(COMPLETE, share <= limit, description + _first(artifact, "first_left_out"), left_out=left_out)


def _first(artifact: Artifact, name: str) -> str:
    """What the job says of the first pair that something is wrong with; nothing where there is none."""
    return f". The first: {said}" if (said := artifact.details.get(name)) else ""  # an earlier version did not say it


def splits(artifact: Artifact) -> dg.AssetCheckResult:
    shared = artifact.details["shared_prompts"]
    description = f"{shared:,} prompts are in both splits"
    if shared:
        description += (
            ": they are not the same in the data, but the chat template writes them alike (with | trim, say). Make them the "
            "same there, or leave out one of them"
        )
    return _result(SPLITS, shared == 0, description + _first(artifact, "first_shared_prompt"), shared_prompts=shared)


def coverage(artifact: Artifact, pairs: int) -> dg.AssetCheckResult:
    rows, finite = artifact.details["pairs"], artifact.details["finite"]
    description = f"{rows:,} rows for {pairs:,} pairs, {finite:,} of them finite"
    return _result(COVERAGE, rows == pairs == finite, description, rows=rows, finite=finite)


def step0(artifact: Artifact) -> dg.AssetCheckResult:
    found, expected, allowed = (artifact.details[f"step0_{name}"] for name in ("loss", "expected", "allowed"))
    description = f"the loss before the first update is {found:.6f}, expected {expected:.6f} within {allowed:.6f}"
    return _result(STEP0, abs(found - expected) <= allowed, description, loss=found, expected=expected)


def rewards(artifact: Artifact) -> dg.AssetCheckResult:
    finite = bool(artifact.details["rewards_finite"])
    return _result(REWARDS, finite, "all finite" if finite else "a step has rewards that are not finite numbers")


def accuracy(artifact: Artifact) -> dg.AssetCheckResult:
    low, high = artifact.details["interval"]
    value = artifact.details["metrics"]["eval/rewards/accuracies"]
    description = f"held-out accuracy {value:.3f}, 95% interval {low:.3f} to {high:.3f}"
    return _result(ACCURACY, low > 0.5, description, accuracy=value, low=low, high=high)


def leakage(found: Leakage, pairs: int) -> dg.AssetCheckResult:
    leaked = len(found.pairs)
    description = "the policy started from none that a recipe of this store has trained"
    if found.policies:
        listed = ", ".join(map(short, found.policies))
        description = (
            f"{leaked:,} of {pairs:,} held-out pairs have prompts that were trained on before, by what the policy started from "
            f"({listed})"
        )
    if leaked:
        description += (
            ": losses, accuracies and floors look better than they are. The gate leaves these pairs out; "
            "`training.start_from: reference`, or a `reference.model` that was not trained on them, starts anew"
        )
    if found.unknown:
        description += f"; what {', '.join(map(short, found.unknown))} was trained on is not in this store"
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


def _result(name: str, passed: bool, description: str, **figures: float) -> dg.AssetCheckResult:
    severity = dg.AssetCheckSeverity.WARN if name in _WARNINGS else dg.AssetCheckSeverity.ERROR
    return dg.AssetCheckResult(
        passed=passed, check_name=name, severity=severity, description=description, metadata=figures
    )
