"""A cancelled training job saves a checkpoint, and ends within its grace period."""

import json
import time
from typing import Any

import pytest

from training.contract.config.training import Training
from training.contract.protocol.events import read_events
from training.contract.protocol.job import Job
from training.launch.launcher import write_job
from training.launch.local import LocalEngine

pytestmark = pytest.mark.slow
SETTINGS = Training.model_validate({"batch_size": 8, "max_steps": 4000}).model_dump(mode="json")


def wait_for_step(job: Job) -> None:
    deadline = time.monotonic() + 90
    while not any(event["event"] == "step" for event in read_events(job.events)):
        assert time.monotonic() < deadline, job.log.read_text()[-2000:]
        time.sleep(0.05)


def test_cancel_of_training_saves_a_checkpoint(tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = tiny_inputs.job("policy", SETTINGS, processes_per_node=2, checkpoint_every=4000)
    write_job(job)
    handle = LocalEngine().submit(job)
    wait_for_step(job)
    handle.cancel()
    failure = json.loads(job.error.read_text())
    last = max(event["step"] for event in read_events(job.events) if event["event"] == "step")
    assert failure["type"] == "TrainingError" and not failure["traceback"]
    assert f"after step {last} of 4000; checkpoint saved" in failure["message"]
    assert [path.name for path in job.checkpoints.glob("*/*")] == [f"step-{last:08d}"]


def test_grace_seconds_of_a_job_without_checkpoints_is_one(tiny_inputs: Any):
    assert tiny_inputs.job("policy", SETTINGS, grace_seconds=17).grace_seconds == 17
    assert tiny_inputs.job("reference", {}, grace_seconds=17).grace_seconds == 1
