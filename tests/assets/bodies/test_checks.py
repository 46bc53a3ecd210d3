"""Limits of the asset checks, with numbers on both sides. Tests of full runs cover the details in manifests."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dagster as dg
import pytest

from assets.bodies import checks
from assets.comparison.disclosure import Meter
from assets.pipeline.graph import derive
from tests import factories
from training.contract.config.recipe import Evaluation
from training.contract.protocol.artifacts import (
    EVALUATION,
    POLICY,
    RAW_PREFERENCES,
    REFERENCE_LOGPROBS,
    TOKENIZED_PAIRS,
)
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import ArtifactKind
from training.contract.store.manifest import Manifest

KIND_OF_CHECK: dict[Callable[..., Any], ArtifactKind[Any]] = {
    checks.quarantine: RAW_PREFERENCES,
    **dict.fromkeys((checks.responses, checks.prefix, checks.complete, checks.splits), TOKENIZED_PAIRS),
    checks.coverage: REFERENCE_LOGPROBS,
    **dict.fromkeys((checks.step0, checks.rewards), POLICY),
    checks.accuracy: EVALUATION,
}
WON = {"eval/rewards/accuracies": 0.6}
FIRST = {"first_prefix_violation": "", "first_left_out": ""}
NONE_SHOWN: dict[str, Any] = {"quarantine_examples": []}


def artifact(check: Callable[..., Any], **fields: Any) -> Artifact[Any]:
    """Return an artifact of the kind that `check` takes, with these fields of its details."""
    kind = KIND_OF_CHECK[check]
    details = factories.details(kind.model, **fields).to_json()
    how = derive(kind.name, {})
    manifest = Manifest(
        kind=kind.name, fingerprint="f" * 64, made_from=how, libraries={}, created="", files={}, details=details
    )
    return Artifact(kind, Path(), manifest, how, details)


@pytest.mark.parametrize(
    ("check", "details", "more", "passes"),
    [
        (checks.quarantine, {"counts": {"rows_read": 16, "quarantined": 4}} | NONE_SHOWN, [0.25], True),
        (checks.quarantine, {"counts": {"rows_read": 16, "quarantined": 5}} | NONE_SHOWN, [0.25], False),
        (checks.quarantine, {"counts": {"rows_read": 0, "quarantined": 0}} | NONE_SHOWN, [0.25], False),
        (checks.responses, {"empty_masks": 0}, [], True),
        (checks.responses, {"empty_masks": 1}, [], False),
        (checks.prefix, {"prefix_violations": 4, "counts": {"pairs": 12}} | FIRST, [0.25], True),
        (checks.prefix, {"prefix_violations": 4, "counts": {"pairs": 11}} | FIRST, [0.25], False),
        (checks.prefix, {"prefix_violations": 0, "counts": {"pairs": 0}} | FIRST, [0.25], True),
        (checks.complete, {"left_out": 4, "counts": {"pairs": 12}} | FIRST, [0.25], True),
        (checks.complete, {"left_out": 4, "counts": {"pairs": 11}} | FIRST, [0.25], False),
        (checks.complete, {"left_out": 0, "counts": {"pairs": 0}} | FIRST, [0.25], True),
        (checks.splits, {"shared_prompts": 0}, [], True),
        (checks.splits, {"shared_prompts": 1}, [], False),
        (checks.coverage, {"pairs": 9, "finite": 9}, [9], True),
        (checks.coverage, {"pairs": 9, "finite": 8}, [9], False),
        (checks.coverage, {"pairs": 9, "finite": 9}, [10], False),
        (checks.step0, {"step0_loss": 0.5, "step0_expected": 0.75, "step0_allowed": 0.25}, [], True),
        (checks.step0, {"step0_loss": 1.5, "step0_expected": 0.75, "step0_allowed": 0.5}, [], False),
        (checks.step0, {"step0_loss": 0.0, "step0_expected": 0.75, "step0_allowed": 0.5}, [], False),
        (checks.step0, {"step0_loss": math.nan, "step0_expected": 0.75, "step0_allowed": 0.5}, [], False),
        (checks.rewards, {"rewards_finite": True}, [], True),
        (checks.rewards, {"rewards_finite": False}, [], False),
        (checks.accuracy, {"interval": [0.51, 0.7], "metrics": WON}, [], True),
        (checks.accuracy, {"interval": [0.5, 0.7], "metrics": WON}, [], False),
    ],
)
def test_check_at_its_limit_passes(check, details, more, passes):
    result = check(artifact(check, **details), *more)
    assert result.passed is passes
    warns = result.check_name == checks.ACCURACY
    assert result.severity == (dg.AssetCheckSeverity.WARN if warns else dg.AssetCheckSeverity.ERROR)


def test_quarantine_with_rows_names_counts_file_and_first_row():
    place = {"source": "rows.jsonl", "line": 21, "text": "{}"}
    row = {**place, "reason": "wrong type", "detail": "`chosen` is int, expected text"}
    result = checks.quarantine(
        artifact(checks.quarantine, counts={"rows_read": 16, "quarantined": 5}, quarantine_examples=[row]), 0.25
    )
    description = result.description or ""
    for value in ("5 of 16 rows", "31.2%", "25.0%", "data.max_quarantined", "quarantine.parquet"):
        assert value in description
    assert description.endswith("rows.jsonl, line 21: wrong type, `chosen` is int, expected text")


@pytest.mark.parametrize(
    ("check", "name"), [(checks.prefix, "first_prefix_violation"), (checks.complete, "first_left_out")]
)
def test_check_with_a_first_example_ends_with_it(check, name):
    counts = {"prefix_violations": 4, "left_out": 4, "counts": {"pairs": 11}}
    descriptions = [
        check(artifact(check, **counts, **more), 0.25).description for more in ({name: "row 7, no"}, {name: ""})
    ]
    assert all("data.max_quarantined" in text for text in descriptions)
    assert [text.endswith("row 7, no") for text in descriptions] == [True, False]


@pytest.mark.parametrize(("votes", "passes"), [(0.63, False), (0.64, True)])
def test_accuracy_by_votes_passes_above_half_and_hides_the_exact_one(votes: float, passes: bool) -> None:
    """By Hoeffding's inequality, half the width of the 95% interval of 100 votes is sqrt(ln(40) / 200) = 0.1358."""
    result = checks.accuracy(artifact(checks.accuracy, metrics=WON, interval=[0.55, 0.65], accuracy_votes=votes))
    assert result.passed is passes
    assert "0.6," not in f"{result.description} {result.metadata}" and "0.55" not in (result.description or "")


@pytest.mark.parametrize(
    ("disclosure", "nats", "passes", "says"),
    [
        ("votes", 4.0, True, "0.100 after 4 nats"),
        ("votes", 4.1, False, "hold out new pairs"),
        ("votes", math.inf, False, "because exact figures were shown: hold out new pairs"),
        ("exact", math.inf, True, "unbounded"),
    ],
)
def test_disclosure_passes_within_the_budget(
    disclosure: Literal["exact", "votes"], nats: float, passes: bool, says: str
) -> None:
    """sqrt(4 / 400) is 0.1, the default budget."""
    result = checks.disclosure(Meter(nats, 200), Evaluation(disclosure=disclosure))
    assert (result.passed, result.severity) == (passes, dg.AssetCheckSeverity.WARN)
    assert says in (result.description or "")
