"""The state of a run: thinned curves, the last step's metrics, and seconds over several attempts."""

from typing import Any

import pytest

from tests import factories
from tests.training.runs import settings, tune
from training.contract.protocol.job import Job
from training.loop.run_state import RunState


def record_of(job: Job) -> RunState:
    return RunState(factories.context(job), ("loss",))


@pytest.mark.parametrize(("steps", "kept"), [(7, 7), (200, 200), (450, 151)])
def test_add_step_keeps_about_200_values_of_a_curve(tiny_inputs: Any, steps: int, kept: int):
    """Of 450 steps it keeps every third (150, with the last one) and the first."""
    record = record_of(tiny_inputs.job("policy", settings()))
    for step in range(1, steps + 1):
        record.add_step(step, steps, {"loss": 1 / step, "peak_memory_mb": 500.0 - step, "grad_norm": 2.0}, tokens=10)
    found = record.figures.series
    assert found.keys() == {"steps", "loss"}
    assert (found["steps"][0], found["steps"][-1], len(found["steps"])) == (1, steps, kept)
    assert found["loss"] == [1 / step for step in found["steps"]]
    assert (record.figures.steps, record.figures.tokens, record.figures.peak_memory_mb) == (steps, 10 * steps, 499.0)
    assert record.figures.train["loss"] == 1 / steps


def test_restore_takes_saved_figures_and_adds_seconds(tiny_inputs: Any):
    before, after = (record_of(tiny_inputs.job("policy", settings())) for _ in range(2))
    before.figures.tokens, before.figures.seconds = 70, {"training": 5.0, "loading": 2.0}
    after.figures.seconds = {"loading": 3.0}
    after.restore(before.figures.to_json())
    assert after.figures.tokens == 70
    assert after.figures.seconds == {"training": 5.0, "loading": 5.0}
    assert after.figures.to_json().keys() == before.figures.to_json().keys()


def test_resumed_step_is_the_last_checkpoint(tiny_inputs: Any):
    job = tiny_inputs.job("policy", settings(max_steps=3), checkpoint_every=2)
    assert record_of(job).resumed_step is None
    tune(job)
    assert record_of(job).resumed_step == 2
