"""The trajectory of 50 steps matches the file, and two runs give the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.golden_trajectory import FILE, SERIES, SETTINGS, trajectory

# Absolute and relative: four times the rounding differences between the kernels in golden_trajectory.py.
TOLERANCE = 1e-5
HOW = "if the change is intended, run `python -m tests.training.golden_trajectory` and commit the file with the reason"


def first_difference(actual: dict[str, Any]) -> str | None:
    """Return the first difference from the golden trajectory, or None."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    for step in range(len(golden["loss"])):
        for name in SERIES:
            value, expected = actual[name][step], golden[name][step]
            if value != pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE):
                return f"step {step + 1}: {name} is {value}, the golden trajectory has {expected}; {HOW}"
    return None


def test_trajectory_matches_the_golden_one_and_repeats_bit_for_bit(tmp_path: Path):
    actual = trajectory(tmp_path / "once")
    assert (difference := first_difference(actual)) is None, difference
    assert trajectory(tmp_path / "again") == actual


def test_trajectory_with_slightly_changed_weight_decay_differs(tmp_path: Path):
    """The tolerance covers rounding, but not a weight decay of 0.101 instead of 0.1."""
    optimizer = SETTINGS["optimizer"] | {"weight_decay": 0.101}
    assert first_difference(trajectory(tmp_path, optimizer=optimizer)) is not None


def test_golden_trajectory_has_learning_and_clipped_steps():
    """It has 50 steps. The loss falls, and some steps are clipped (a norm over 1)."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert [len(golden[name]) for name in SERIES] == [50, 50, 50]
    assert golden["loss"][0] == pytest.approx(0.693147, abs=1e-5) and 0.02 < golden["loss"][-1] < 0.3
    assert min(golden["grad_norm"]) < 1 < max(golden["grad_norm"])
