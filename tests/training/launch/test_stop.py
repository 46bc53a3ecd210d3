"""A training job that is cancelled saves before it ends, and its processes are gone well within the time they are given."""

import json
import time
from typing import Any

import pytest

from training.contract.config.recipe import Training
from training.contract.protocol.events import read_events
from training.contract.protocol.job import Job
from training.launch.launcher import write_job
from training.launch.local import LocalLauncher

pytestmark = pytest.mark.slow
SETTINGS = Training.model_validate({"batch_size": 8, "max_steps": 4000}).model_dump(mode="json")


def wait_for_step(job: Job) -> None:
    deadline = time.monotonic() + 90
    while not any(event["event"] == "step" for event in read_events(job.events)):
        assert time.monotonic() < deadline, job.log.read_text()[-2000:]
        time.sleep(0.05)


def test_a_cancelled_training_saves(tiny_world: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = tiny_world.job("policy", SETTINGS, processes_per_node=2, checkpoint_every=4000)
    write_job(job)
    handle = LocalLauncher().start(job)
    wait_for_step(job)
    handle.cancel()
    failure = json.loads(job.error.read_text())
    last = max(event["step"] for event in read_events(job.events) if event["event"] == "step")
    assert failure["type"] == "TrainingError" and not failure["traceback"]
    assert failure["message"].endswith(f"after step {last} of 4000; checkpoint saved; run again to go on")
    assert [place.name for place in job.checkpoints.glob("*/*")] == [f"step-{last:08d}"]


def test_only_training_has_something_to_save(tiny_world: Any):
    assert tiny_world.job("policy", SETTINGS, grace_seconds=17).grace_seconds == 17
    assert tiny_world.job("reference", SETTINGS, grace_seconds=17).grace_seconds == 1
