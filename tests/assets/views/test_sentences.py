"""The first line of each asset's page, against texts written by hand."""

from typing import Any

import pytest

from assets.views import sentences
from tests import factories
from training.contract.protocol.details import EvaluationDetails, PolicyDetails, RowsDetails


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_093_632, "1.09 MB"),
        (999_600, "1,000 kB"),
        (15_000_000_000, "15 GB"),
        (2_500_000_000_000_000, "2,500 TB"),
    ],
)
def test_sized(size: int, text: str) -> None:
    assert sentences.sized(size) == text


def test_of_files_without_known_rows() -> None:
    assert sentences.of_files(1, 850, {"a.jsonl": 12}) == "1 file with 12 rows, 850 B."
    assert sentences.of_files(2, 850, {"a.jsonl": 12, "hub": None}) == "2 files, 850 B."


def test_of_rows_names_what_was_left_out() -> None:
    counts = {"pairs": 1204, "train": 1100, "validation": 104, "quarantined": 3, "duplicates": 0, "conflicting": 1}
    expected = "1,204 pairs: 1,100 to train, 104 held out; 3 quarantined, 1 conflicting."
    assert sentences.of_rows(factories.details(RowsDetails, counts=counts)) == expected
    counts = {**counts, "quarantined": 0, "conflicting": 0}
    assert sentences.of_rows(factories.details(RowsDetails, counts=counts)).endswith("; no row was left out.")


def test_of_policy_names_held_out_figures_only() -> None:
    run: dict[str, Any] = {"steps": 108, "pairs": {"train": 835}, "train": {"loss": 0.6}}
    held_out = {"eval/rewards/accuracies": 0.8192, "eval/loss": 0.56629, "eval/pairs": 83}
    assert sentences.of_policy(factories.details(PolicyDetails, **run, eval=held_out), held_out) == (
        "Trained for 108 steps on 835 pairs. The chosen response has the higher reward in 81.9% of 83 held-out pairs; "
        "loss 0.5663."
    )
    assert sentences.of_policy(factories.details(PolicyDetails, **run), {}) == "Trained for 108 steps on 835 pairs."


def test_of_evaluation_counts_changed_answers() -> None:
    metrics = {"eval/rewards/accuracies": 1.0, "eval/loss": 0.25, "eval/pairs": 1}
    details = EvaluationDetails(metrics=metrics, interval=(0.2, 1.0))
    assert sentences.of_evaluation(details, 1, 2) == (
        "The chosen response has the higher reward in 100.0% of 1 held-out pair; loss 0.25; 95% interval of the share 20.0% to "
        "100.0%. 1 of 2 sampled answers changed."
    )


def test_of_release() -> None:
    assert sentences.of_release("m", 3, False, "too few pairs") == "Version 3 of m is not champion: too few pairs"
