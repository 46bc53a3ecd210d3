"""The win over the champion by votes, drawn once, and decisions without exact figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from assets.comparison.disclosure import DisclosureLog
from assets.comparison.votes import WIN_TAG, undisclosed, win_by_votes, win_figure, win_tags
from model_registry.gate.scores import Decision, GateMetric, PairedScores
from model_registry.model_version import Version, lineage_tags
from tests import factories
from tests.assets.comparison.test_disclosure import rows_of
from training.contract.protocol.artifacts import EVALUATION, AssetName
from training.contract.protocol.details import EvaluationDetails
from training.contract.protocol.votes import ACCURACY_VOTES, WIN_VOTES
from training.contract.store.artifact import Artifact
from training.contract.store.manifest import Manifest

VOTED = factories.details(EvaluationDetails, accuracy_votes=0.61)
FINGERPRINT = "e" * 64


def evaluation(name: str = "one") -> Artifact[EvaluationDetails]:
    """Return an evaluation by votes. `name` changes its key."""
    made_from, details = factories.derivation("evaluation", name=name), VOTED.to_json()
    manifest = Manifest(
        kind="evaluation",
        fingerprint=FINGERPRINT,
        made_from=made_from,
        libraries={},
        created="",
        files={},
        details=details,
    )
    return Artifact(EVALUATION, Path(), manifest, made_from, details)


def scores(candidate: dict[str, float], champion: dict[str, float] | None, leaked: str = "") -> PairedScores:
    return PairedScores(GateMetric.LOSS, candidate, champion, leaked=frozenset(leaked))


@pytest.mark.parametrize(
    ("candidate", "champion", "leaked", "expected"),
    [
        ({"a": 0.1, "b": 0.2}, {"a": 0.2, "b": 0.3}, "", 1.0),
        ({"a": 0.3, "b": 0.4}, {"a": 0.2, "b": 0.3}, "", 0.0),
        ({"a": 0.1, "b": 0.9, "c": 9.0}, {"a": 0.2, "b": 0.3, "d": 0.0}, "b", 1.0),
        ({"a": float("nan")}, {"a": 0.2}, "", 0.0),
        ({"a": 0.1}, {"b": 0.2}, "", None),
        ({"a": 0.1}, None, "", None),
    ],
)
def test_win_counts_lower_values_on_shared_pairs_without_leakage(
    candidate: dict[str, float], champion: dict[str, float], leaked: str, expected: float | None, tmp_path: Path
) -> None:
    log, rows = DisclosureLog(tmp_path, "demo"), rows_of(tmp_path, "ab")
    found = win_by_votes(log, [], evaluation(), rows, scores(candidate, champion, leaked))
    assert (found, log.win(FINGERPRINT)) == (expected, expected)


def test_equal_values_win_half_of_the_votes(tmp_path: Path) -> None:
    log, rows, same = DisclosureLog(tmp_path, "demo"), rows_of(tmp_path, "ab"), {"a": 0.5, "b": 0.5}
    found = win_by_votes(log, [], evaluation(), rows, scores(same, same))
    assert found is not None and 0.3 < found < 0.7


def test_win_is_drawn_once_whatever_the_champion_is_later(tmp_path: Path) -> None:
    log, rows = DisclosureLog(tmp_path, "demo"), rows_of(tmp_path, "ab")
    better, worse = {"a": 0.1}, {"a": 0.9}
    assert win_by_votes(log, [], evaluation(), rows, scores(better, worse)) == 1.0
    assert win_by_votes(log, [], evaluation("two"), rows, scores(worse, better)) == 1.0
    assert len(log.lines()) == 1
    tags = {**lineage_tags({AssetName.EVALUATION: FINGERPRINT}), WIN_TAG: "0.75"}
    versions = [Version("m", 2, "", {}), Version("m", 1, "", tags)]
    elsewhere = DisclosureLog(tmp_path / "other", "demo")
    assert win_by_votes(elsewhere, versions, evaluation(), rows, scores(worse, better)) == 0.75


@pytest.mark.parametrize("promote", [True, False])
def test_undisclosed_decision_has_only_the_outcome_and_two_figures(promote: bool) -> None:
    decision = Decision(promote, ["on 83 shared pairs the loss is 0.5663 lower than the champion's"], {"gain": 0.5663})
    assert undisclosed(decision, factories.details(EvaluationDetails), 0.4) is decision
    found = undisclosed(decision, VOTED, 0.4)
    outcome = "promoted it" if promote else "did not promote it"
    reason = f"the gate {outcome}; 100 votes give an accuracy of 0.61 and a win over the champion of 0.40"
    assert found == Decision(promote, [reason], {ACCURACY_VOTES: 0.61, WIN_VOTES: 0.4})
    alone = undisclosed(decision, VOTED, None)
    assert alone.reasons == [f"the gate {outcome}; 100 votes give an accuracy of 0.61"]


def test_tag_of_a_version_gives_its_win_again() -> None:
    version = Version("m", 1, "", {})
    decision = undisclosed(Decision(True, [], {}), VOTED, 0.07)
    assert win_figure(replace(version, tags=win_tags(decision))) == {WIN_VOTES: 0.07}
    assert win_figure(version) == {} and win_tags(Decision(True, [], {})) == {}
