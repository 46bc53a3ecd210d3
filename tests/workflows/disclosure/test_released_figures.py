"""The release of a recipe with `evaluation.disclosure: votes`: two figures, and no exact one anywhere."""

from typing import Any

import pytest

from model_registry.files import local_path
from tests.workflows.disclosure.shown_texts import held_out_numbers, held_out_texts, leaks, shown_texts
from tests.workflows.disclosure.voted_home import meter_lines, run
from tests.workflows.in_process import Baseline
from training.contract.protocol.votes import ACCURACY_VOTES, WIN_VOTES

TAG = "pedigree.win_votes"


@pytest.mark.parametrize("gate", ["ladder", "anytime"])
def test_release_shows_two_figures_and_nothing_else(baseline: Baseline, gate: str) -> None:
    edited: dict[str, dict[str, Any]] = {"training": {"seed": 3}, "release": {"gate": {"type": gate}}}
    report = run(baseline, None, **edited)
    assert list(report.metrics) == [ACCURACY_VOTES, WIN_VOTES] and report.gate == {}
    hidden = held_out_numbers(baseline, "plain") | held_out_texts(baseline, "plain")
    assert leaks(shown_texts(baseline, "plain", report), hidden) == set()
    accuracy, win = (report.metrics[name] for name in (ACCURACY_VOTES, WIN_VOTES))
    outcome = "the gate promoted it" if report.is_champion else "the gate did not promote it"
    assert report.reasons == (
        f"{outcome}; 100 votes give an accuracy of {accuracy:.2f} and a win over the champion of {win:.2f}"
    )
    version = baseline.services.registry.versions("plain")[0]
    files = local_path(version.source)
    assert files is not None and {path.name for path in files.iterdir()} >= {"model", "lineage.json"}
    assert not (files / "evaluation").exists() and f"{accuracy:.2f}" in (files / "model" / "README.md").read_text()
    assert run(baseline, None, **edited).metrics == report.metrics


def test_another_version_of_the_same_evaluation_reuses_its_win(baseline: Baseline) -> None:
    first = run(baseline, training={"seed": 3})
    lines = meter_lines(baseline)
    again = run(baseline, training={"seed": 3}, release={"gate": {"type": "ladder", "min_accuracy": 0.0}})
    assert (again.model_version, first.model_version) == ("3", "2")
    assert again.metrics == first.metrics and meter_lines(baseline) == lines
    latest, earlier, _ = baseline.services.registry.versions("plain")
    assert latest.tags[TAG] == earlier.tags[TAG] == str(first.metrics[WIN_VOTES])
