"""A run with dropout that is killed at any point and resumed has the bits of an undisturbed run.

A test kills one job many times, each time a little later. Each attempt resumes from the previous checkpoint.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.training.runs import published, timeless, told, tune
from tests.training.tiny_inputs import build_tiny_inputs
from training.checkpoint.async_saver import AsyncSaver
from training.contract.config.training import Training
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact
from training.contract.store.manifest import read_manifest
from training.loop.policy_callbacks import EvaluateHeldOut

pytestmark = pytest.mark.slow
STEPS = 20
SETTINGS = Training.model_validate(
    {
        "loss": {"beta": 0.5},
        "batch_size": 4,
        "micro_tokens": 64,
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1},
        "max_steps": STEPS,
        "disable_dropout": False,
    }
).model_dump(mode="json")
COMPUTE = {"checkpoint_every": 3, "evaluate_every": 7}


class Killed(BaseException):
    """Ends an attempt in this process like SIGKILL: the run does not handle it."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_tiny_inputs(tmp_path_factory.mktemp("world"), attention_dropout=0.2)


@pytest.fixture(scope="module")
def calm(inputs: Any, forker: Any) -> Artifact[Any]:
    """Return the policy of an undisturbed run."""
    job = inputs.job("policy", SETTINGS, "calm", **COMPUTE)
    return published(job, forker.run(job))


def disturb(forker: Any, job: Job, ends: Iterable[dict[str, float]], world: int = 1) -> Artifact[Any]:
    """Kill one attempt for each of `ends`, until one finishes first. Then finish the job, and return its artifact."""
    killed = 0
    for end in ends:
        statuses = forker.run(job, world, **end)
        assert 1 not in statuses, job.log.read_text()[-3000:]
        if statuses == [0] * world:
            break
        killed += 1
    else:
        statuses = forker.run(job, world)
    assert killed > 0
    return published(job, statuses)


def assert_same(found: Artifact[Any], expected: Artifact[Any]) -> None:
    assert timeless(told(found, "step", "eval")) == timeless(told(expected, "step", "eval"))
    facts = [json.loads((artifact.folder / "metrics.json").read_text()) for artifact in (found, expected)]
    for name in ("series", "tokens", "steps", "step0_loss", "eval"):
        assert facts[0][name] == facts[1][name]
    assert found.fingerprint == expected.fingerprint
    files = [(artifact.folder / "model.safetensors").read_bytes() for artifact in (found, expected)]
    assert files[0] == files[1]


def test_policy_killed_at_every_step_has_the_same_bits(inputs: Any, forker: Any, calm: Artifact[Any]):
    job = inputs.job("policy", SETTINGS, "steps", **COMPUTE)
    assert_same(disturb(forker, job, ({"step": step} for step in range(1, STEPS + 1))), calm)


@pytest.mark.system
def test_policy_killed_between_file_operations_has_the_same_bits(inputs: Any, forker: Any, calm: Artifact[Any]):
    """It is killed at opens, renames and removals of files and folders, from the resuming on."""
    job = inputs.job("policy", SETTINGS, "operations", **COMPUTE)
    assert_same(disturb(forker, job, ({"touch": count} for count in range(1, 60, 3))), calm)


@pytest.mark.system
def test_policy_killed_while_a_file_grows_has_the_same_bits(inputs: Any, forker: Any, calm: Artifact[Any]):
    """It is killed at offsets of a file of about 170,000 bytes. No checkpoint is complete, so each attempt starts again."""
    job = inputs.job("policy", SETTINGS, "offsets", **COMPUTE)
    assert_same(disturb(forker, job, ({"size": size} for size in (9_000, 20_000, 65_537, 131_072, 169_000))), calm)


@pytest.mark.system
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_policy_on_two_ranks_killed_has_the_same_bits(inputs: Any, forker: Any, way: str):
    """At last a part of the checkpoint that only rank 1 reads is corrupt. Both ranks then use the previous checkpoint."""
    names = (f"calm-{way}", f"killed-{way}")
    calm, job = (inputs.job("policy", SETTINGS, name, parallel=way, **COMPUTE) for name in names)

    def ends() -> Iterator[dict[str, float]]:
        yield {"step": 5}
        yield {"touch": 25}
        yield {"saved": 17}
        file = max(job.checkpoints.glob("*/step-????????")) / "rank-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    disturbed = disturb(forker, job, ends(), world=2)
    assert any("is not used" in note["text"] for note in told(disturbed, "note"))
    assert_same(disturbed, published(calm, forker.run(calm, 2)))


def test_policy_with_sigterm_after_the_last_step_saves(inputs: Any, forker: Any, calm: Artifact[Any]):
    """No later step can notice the signal, and writing the policy may take long."""
    job = inputs.job("policy", SETTINGS, "stopped-late", **(COMPUTE | {"checkpoint_every": 100}))
    assert forker.run(job, stop=20) == [1]
    assert "stopped by SIGTERM after step 20 of 20; checkpoint saved" in job.error.read_text()
    job.error.unlink()
    assert_same(published(job, forker.run(job)), calm)


def test_policy_with_sigterm_after_a_save_does_not_save_again(inputs: Any, forker: Any, calm: Artifact[Any]):
    """A second save of that step would first remove the only checkpoint. Its facts would then have seconds of a save."""
    job = inputs.job("policy", SETTINGS, "stopped-saved", **(COMPUTE | {"checkpoint_every": 20, "keep_checkpoints": 1}))
    assert forker.run(job, stop=20) == [1]
    [checkpoint] = job.checkpoints.glob("*/step-????????")
    assert "checkpoints" not in read_manifest(checkpoint).details["seconds"]
    job.error.unlink()
    assert_same(published(job, forker.run(job)), calm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_with_sigterm_saves_after_the_next_step(inputs: Any, forker: Any, ranks: int):
    """SIGTERM comes after the event of step 7. The run notices it in step 8, whose evaluation is due, and saves."""
    job = inputs.job(
        "policy", SETTINGS, f"stopped-{ranks}", **(COMPUTE | {"checkpoint_every": 100, "evaluate_every": 8})
    )
    undisturbed = inputs.job("policy", SETTINGS, f"undisturbed-{ranks}", **(COMPUTE | {"evaluate_every": 8}))
    calm = published(undisturbed, forker.run(undisturbed, ranks))
    assert forker.run(job, ranks, stop=7) == [1] * ranks
    message = "stopped by SIGTERM after step 8 of 20; checkpoint saved; run again to go on"
    assert message in job.error.read_text() or "a signal to another rank" in job.error.read_text()
    assert [p.name for p in job.checkpoints.glob("*/*")] == ["step-00000008"]
    job.error.unlink()
    assert_same(published(job, forker.run(job, ranks)), calm)


@pytest.mark.parametrize("event_written", [False, True])
def test_policy_killed_in_an_evaluation_resumes_from_that_step(
    inputs: Any, forker: Any, calm: Artifact[Any], monkeypatch: pytest.MonkeyPatch, event_written: bool
):
    """A long evaluation may outlast the grace period of a stop. Its event must appear once, also if it was written before."""
    job = inputs.job("policy", SETTINGS, f"evaluating-{event_written}", **(COMPUTE | {"checkpoint_every": 7}))
    evaluate, start = EvaluateHeldOut.evaluate, AsyncSaver.start
    savers: list[AsyncSaver] = []

    def started(saver: AsyncSaver, *state: Any) -> None:
        savers.append(saver)
        start(saver, *state)

    def killed(callback: EvaluateHeldOut, step: int) -> None:
        if step == 0 or event_written:
            evaluate(callback, step)
        if step == 7:
            savers[-1].finish()
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(AsyncSaver, "start", started)
        patched.setattr(EvaluateHeldOut, "evaluate", killed)
        tune(job)
    found = published(job, forker.run(job))
    assert "resumed from the checkpoint of step 7" in [note["text"] for note in told(found, "note")]
    assert_same(found, calm)
