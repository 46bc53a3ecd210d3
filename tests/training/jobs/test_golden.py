"""The trajectory of 50 steps is the one in the file, and the same to the last bit when it is made again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.golden_trajectory import FILE, SERIES, SETTINGS, trajectory

# Absolute and relative: four times what rounding does to these 50 steps among the kernels that golden_trajectory.py names.
TOLERANCE = 1e-5
HOW = "if it was meant to change, run `python -m tests.training.golden_trajectory` and commit the file with the reason"


def departure(found: dict[str, Any]) -> str | None:
    """Where `found` first leaves the golden trajectory; None if it does not."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    for step in range(len(golden["loss"])):
        for name in SERIES:
            ours, kept = found[name][step], golden[name][step]
            if ours != pytest.approx(kept, rel=TOLERANCE, abs=TOLERANCE):
                return f"step {step + 1}: {name} is {ours}, the golden trajectory has {kept}; {HOW}"
    return None


def test_the_trajectory_is_the_golden_one_and_repeats_bit_for_bit(tmp_path: Path):
    found = trajectory(tmp_path / "once")
    assert (left := departure(found)) is None, left
    assert trajectory(tmp_path / "again") == found


def test_a_small_change_is_noticed(tmp_path: Path):
    """Within the tolerance is rounding, and not a weight decay of 0.101 instead of 0.1."""
    optimizer = SETTINGS["optimizer"] | {"weight_decay": 0.101}
    assert "the golden trajectory has" in (departure(trajectory(tmp_path, optimizer=optimizer)) or "")


def test_the_golden_run_goes_through_what_it_is_there_for():
    """50 steps in which it learns, clipped (a norm over 1) and not clipped."""
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert [len(golden[name]) for name in SERIES] == [50, 50, 50]
    assert golden["loss"][0] == pytest.approx(0.693147, abs=1e-5) and 0.02 < golden["loss"][-1] < 0.3
    assert min(golden["grad_norm"]) < 1 < max(golden["grad_norm"])
