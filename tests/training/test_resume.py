"""Killed at any point and taken up again, a run with dropout ends with the bits of one that nobody disturbed.

One job is killed again and again, each time a little later, and goes on from what the attempt before had committed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from training.contract.events import read_events
from training.contract.job import Job
from training.contract.recipe import Training
from training.contract.store import Artifact, Store

pytestmark = pytest.mark.slow
STEPS = 20
SETTINGS = Training.model_validate(
    {
        "loss": {"beta": 0.5},
        "batch_size": 4,
        "micro_tokens": 64,
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1},
        "max_steps": STEPS,
    }
).model_dump(mode="json")
COMPUTE = {"checkpoint_every": 3, "evaluate_every": 7}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, world_builder: Callable[..., Any]) -> Any:
    return world_builder(tmp_path_factory.mktemp("world"), attention_dropout=0.2)


@pytest.fixture(scope="module")
def calm(world: Any, forker: Any) -> Artifact:
    """The run that nobody disturbed."""
    job = world.job("policy", SETTINGS, "calm", **COMPUTE)
    assert forker.run(job) == [0], job.log.read_text()[-3000:]
    return published(job)


def published(job: Job) -> Artifact:
    found = Store(job.store).find("policy", job.derivation.key)
    assert found is not None
    return found


def told(artifact: Artifact) -> list[dict[str, Any]]:
    """What was told of steps and held-out pairs, less what depends on the clock and on memory."""
    timed = {"time", "tokens_per_second", "peak_memory_mb"}
    events = [e for e in read_events(artifact.folder / "events.jsonl") if e["event"] in ("step", "eval")]
    return [{name: value for name, value in event.items() if name not in timed} for event in events]


def disturb(forker: Any, job: Job, ends: Iterable[dict[str, float]], world: int = 1) -> Artifact:
    """End attempt after attempt, until one comes to its end before its time, or all were ended; then finish the work."""
    killed = 0
    for end in ends:
        statuses = forker.run(job, world, **end)
        assert 1 not in statuses, job.log.read_text()[-3000:]
        if statuses == [0] * world:
            break
        killed += 1
    else:
        assert forker.run(job, world) == [0] * world, job.log.read_text()[-3000:]
    assert killed > 0
    return published(job)


def assert_same(found: Artifact, expected: Artifact) -> None:
    assert told(found) == told(expected)
    assert found.fingerprint == expected.fingerprint
    files = [(artifact.folder / "model.safetensors").read_bytes() for artifact in (found, expected)]
    assert files[0] == files[1]


def test_killed_at_every_step(world: Any, forker: Any, calm: Artifact):
    job = world.job("policy", SETTINGS, "steps", **COMPUTE)
    assert_same(disturb(forker, job, ({"step": step} for step in range(1, STEPS + 1))), calm)


def test_killed_between_the_operations_of_a_save(world: Any, forker: Any, calm: Artifact):
    """Opening, renaming and removing of files and folders, one after the other, from those of resuming on."""
    job = world.job("policy", SETTINGS, "operations", **COMPUTE)
    assert_same(disturb(forker, job, ({"touch": count} for count in range(1, 60, 3))), calm)


def test_killed_while_a_file_grows(world: Any, forker: Any, calm: Artifact):
    """At offsets of a file of some 170,000 bytes: no checkpoint is ever whole, so each attempt begins anew."""
    job = world.job("policy", SETTINGS, "offsets", **COMPUTE)
    assert_same(disturb(forker, job, ({"size": size} for size in (9_000, 20_000, 65_537, 131_072, 169_000))), calm)


def test_two_ranks_are_killed_as_one_is(world: Any, forker: Any):
    calm, job = (world.job("policy", SETTINGS, name, parallel="fsdp", **COMPUTE) for name in ("calm-2", "killed-2"))
    assert forker.run(calm, 2) == [0, 0], calm.log.read_text()[-3000:]
    assert_same(disturb(forker, job, ({"step": 5}, {"touch": 25}, {"step": 17}), world=2), published(calm))


def test_asked_to_stop_when_the_last_step_is_told_it_saves(world: Any, forker: Any, calm: Artifact):
    """No step is left that could notice it; what is left is to write the policy, which may take long."""
    job = world.job("policy", SETTINGS, "stopped-late", **(COMPUTE | {"checkpoint_every": 100}))
    assert forker.run(job, stop=20) == [1]
    assert "stopped by SIGTERM after step 20 of 20; checkpoint saved" in job.error.read_text()
    job.error.unlink()
    assert forker.run(job) == [0]
    assert_same(published(job), calm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_asked_to_stop_it_saves_and_says_so(world: Any, forker: Any, calm: Artifact, ranks: int):
    """SIGTERM after step 7 is told, where held-out pairs are due: it is noticed in step 8, saved, and nothing is lost."""
    job = world.job(
        "policy", SETTINGS, f"stopped-{ranks}", **(COMPUTE | {"checkpoint_every": 100, "evaluate_every": 8})
    )
    undisturbed = world.job("policy", SETTINGS, f"undisturbed-{ranks}", **(COMPUTE | {"evaluate_every": 8}))
    assert forker.run(undisturbed, ranks) == [0] * ranks
    assert forker.run(job, ranks, stop=7) == [1] * ranks
    message = "stopped by SIGTERM after step 8 of 20; checkpoint saved; run again to go on"
    assert message in job.error.read_text() or "a signal to another rank" in job.error.read_text()
    assert [p.name for p in job.checkpoints.glob("*/*")] == ["step-00000008"]
    job.error.unlink()
    assert forker.run(job, ranks) == [0] * ranks
    assert_same(published(job), published(undisturbed))
