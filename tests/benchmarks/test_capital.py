"""The arrays of the simulation match the capital, the clip and the levels in the code of the gate."""

import math

import numpy as np
import pytest

from benchmarks.gate.capital import (
    ALPHA,
    clips,
    log_capitals,
    log_evidence,
    log_levels,
    prompts_for_clip,
)
from model_registry.gate import betting
from model_registry.gate.anytime import choose_clip
from model_registry.gate.e_lond import level
from model_registry.gate.scores import GateMetric
from training.contract.config.release import Gate


@pytest.mark.parametrize("prompts", [0, 1, 49, 50, 51, 230])
def test_capitals_match_the_gate(prompts: int) -> None:
    differences_NM = np.random.default_rng(prompts).uniform(-1, 1, size=(prompts, 3))
    found = log_capitals(differences_NM)
    for at in range(3):
        assert found[:, at] == pytest.approx(betting.log_capitals(differences_NM[:, at]), abs=1e-9)
        assert log_evidence(found)[at] == pytest.approx(betting.log_evidence(differences_NM[:, at]), abs=1e-9)


def test_capitals_of_the_worst_differences_stay_finite() -> None:
    assert np.isfinite(log_capitals(np.full((2000, 1), -1.0))).all()


@pytest.mark.parametrize("prompts", [10, 39, 40, 100, 500])
def test_clips_match_the_gate(prompts: int) -> None:
    differences_NM = np.random.default_rng(prompts).standard_normal((prompts, 2))
    for at in range(2):
        clip, used = choose_clip(differences_NM[:, at].tolist(), GateMetric.LOSS, Gate())
        assert used == prompts_for_clip(prompts)
        assert clips(differences_NM)[at] == pytest.approx(clip)


def test_levels_match_the_gate() -> None:
    assert log_levels(12, 4)[10, 3] == pytest.approx(math.log(level(ALPHA, 10, 3)))
