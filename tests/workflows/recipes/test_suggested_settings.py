"""Settings proposed for data and model, against numbers derived by hand and published ones."""

import math
import re
from typing import Any

import pytest

from tests.workflows.homes import ROOT, check_values
from training.contract.config.optimizer import AdamW
from training.contract.config.training import Training
from workflows.recipes.suggested_settings import (
    STEPS,
    SuggestedSettings,
    advice,
    general_advice,
    number,
    propose,
    size,
)


@pytest.mark.parametrize(
    ("pairs", "batch_size", "epochs", "steps"),
    [
        (9, 4, 10, 30),  # 3 steps an epoch; 34 epochs would be too many
        (72, 4, 6, 108),  # 3 * 72 / 100 = 2.2, so the smallest batch; 18 steps an epoch
        (450, 8, 2, 114),  # 13.5, so 8; 57 steps an epoch
        (1000, 16, 2, 126),  # 30, so 16; 63 steps an epoch
        (10_000, 64, 1, 157),
        (61_000, 64, 1, 954),
    ],
)
def test_steps_for_a_number_of_pairs(pairs: int, batch_size: int, epochs: int, steps: int) -> None:
    assert propose(pairs, None) == SuggestedSettings(batch_size, epochs, None, steps)


def test_epochs_are_as_few_as_have_enough_steps() -> None:
    for pairs in range(40, 5000, 7):
        found = propose(pairs, None)
        assert found.steps >= STEPS or found.epochs == 10
        assert found.epochs == 1 or (found.epochs - 1) * math.ceil(pairs / found.batch_size) < STEPS


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [
        (70.6e9, 2e-7),  # Tulu 3, arXiv 2411.15124
        (8.03e9, 5e-7),  # Tulu 3
        (7.24e9, 5e-7),  # Zephyr, arXiv 2310.16944
        (1.71e9, 1e-6),  # SmolLM2, alignment-handbook
        (7e5, 5e-5),  # by hand: ten thousand times fewer than 7 billion, so a hundred times the rate
        (7e3, 1e-4),  # the limit
    ],
)
def test_learning_rate_for_a_size_is_what_was_published_for_it(parameters: float, rate: float) -> None:
    assert propose(1000, int(parameters)).learning_rate == rate
    assert propose(1000, int(parameters), adapter=True).learning_rate == pytest.approx(10 * rate)


def training(rate: float = 5e-7, **fields: Any) -> Training:
    return Training(optimizer=AdamW(learning_rate=rate), **fields)


DOCS = "(docs/guides/choose-a-loss.md#learning-rate-and-steps)"


@pytest.mark.parametrize(
    ("settings", "pairs", "parameters", "problem", "remedies"),
    [
        (
            training(),
            72,
            1_049_000,
            ("2 steps", "5e-7", "1.05 million", "72 "),
            {"batch_size": "4", "epochs": "6 (108 steps)", "optimizer.learning_rate": "5e-5"},
        ),
        (
            training(),
            1000,
            7_000_000_000,
            ("16 steps", "5e-7", "1,000 "),
            {"batch_size": "16", "epochs": "2 (126 steps)"},
        ),
        (training(max_steps=1), 1000, None, ("1 step", "5e-7", "1,000 "), {"max_steps": "126"}),
        (
            training(epochs=200),
            1000,
            700_000,  # 3,200 steps at 5e-7 sum to 1.6e-3, 100 at the proposed 5e-5 to 5e-3
            ("3,200 steps", "5e-7", "0.7 million", "1,000 "),
            {"optimizer.learning_rate": "5e-5"},
        ),
    ],
)
def test_advice_names_what_to_set(
    settings: Training, pairs: int, parameters: int | None, problem: tuple[str, ...], remedies: dict[str, str]
) -> None:
    found = advice(settings, pairs, parameters)
    assert found is not None
    check_values(found, DOCS, *problem, *(f"training.{name}: {value}" for name, value in remedies.items()))
    assert set(re.findall(r"training\.([\w.]+): ", found)) == remedies.keys()


@pytest.mark.parametrize("parameters", [700_000, 1_710_000_000, 70_600_000_000])
@pytest.mark.parametrize("pairs", [1, 20, 72, 1000, 61_000])
def test_proposed_settings_give_no_advice(pairs: int, parameters: int) -> None:
    found = propose(pairs, parameters)
    assert found.learning_rate is not None
    settings = training(found.learning_rate, batch_size=found.batch_size, epochs=found.epochs)
    assert settings.steps(pairs) == found.steps
    assert advice(settings, pairs, parameters) is None


def test_rate_of_muon_is_judged_only_if_it_is_scaled_like_adamws() -> None:
    slow = {"type": "muon", "learning_rate": 5e-7}
    for scaling, is_judged in (("match_rms_adamw", True), ("original", False)):
        settings = Training.model_validate({"optimizer": {**slow, "adjust_lr": scaling}, "epochs": 10})
        assert (advice(settings, 1000, 700_000) is not None) is is_judged


def test_a_policy_that_hardly_moved_in_many_steps_needs_a_higher_rate() -> None:
    check_values(general_advice(training(), 6400), "100 steps", "5e-7", "training.optimizer.learning_rate")


def test_numbers_are_written_in_short_form() -> None:
    assert [number(value) for value in (5e-7, 2.5e-6, 1e-4)] == ["5e-7", "2.5e-6", "1e-4"]
    assert [size(value) for value in (1_049_000, 8_030_000_000)] == ["1.05 million", "8.03 billion"]


def test_tables_in_the_documents_are_what_is_proposed() -> None:
    section = (
        (ROOT / "docs" / "guides" / "choose-a-loss.md")
        .read_text()
        .partition("## Learning rate and steps")[2]
        .partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    of_pairs = [[int(cell.replace(",", "")) for cell in row] for row in rows if re.fullmatch("[0-9,]+", row[0])]
    for pairs, *documented in of_pairs:
        found = propose(pairs, None)
        assert documented == [found.batch_size, found.epochs, found.steps]
    of_sizes = [row for row in rows if re.fullmatch(r"[\d.]+( to \d+)? [mb]illion", row[0])]
    for size_text, rate, _ in of_sizes:
        count = float(size_text.split()[0]) * (1e9 if "billion" in size_text else 1e6)
        assert propose(1000, int(count)).learning_rate == float(rate)
    assert (len(of_pairs), len(of_sizes)) == (5, 6)
