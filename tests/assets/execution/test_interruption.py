"""How a run ends that is interrupted while it makes an asset, and what it says of checkpoints."""

import signal
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from assets.execution.asset_context import AssetContext
from assets.execution.interruption import ending_in_words, naming_checkpoint, with_stack_traces
from tests.workflows.homes import ATTRIBUTES, write_recipe
from training.contract.protocol.job import Job, checkpoints_of
from workflows.orchestration.resources import build_services
from workflows.recipes.discovery import load_recipe


@pytest.mark.parametrize(("is_command", "status"), [(True, "CANCELED"), (False, "FAILURE")])
def test_an_interrupted_run_has_no_stack_traces_and_that_of_a_command_is_canceled(
    tmp_path: Path, is_command: bool, status: str
):
    """A server that is stopped interrupts its runs too: these are for the automation to start again."""
    pipeline = load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES)).pipeline
    services = replace(build_services(tmp_path / "home"), is_command=is_command)

    @dg.asset
    def made(context: dg.AssetExecutionContext) -> None:
        with ending_in_words(AssetContext(pipeline, services, context)):
            signal.raise_signal(signal.SIGINT)

    with dg.DagsterInstance.ephemeral() as instance:
        with with_stack_traces():
            result = dg.materialize([made], instance=instance, raise_on_error=False)
        assert instance.get_run_by_id(result.run_id).status == dg.DagsterRunStatus(status)
    [failure] = result.filter_events(lambda event: event.is_step_failure)
    error = failure.step_failure_data.error
    command = f"`pedigree run {tmp_path / 'small'}`"
    assert f"interrupted; what was finished is kept, and {command} goes on from there" in error.message
    assert (error.stack, error.cause, error.context) == ([], None, None)


@pytest.mark.parametrize("steps", [[], [50, 57]])
def test_an_interrupted_job_names_its_last_checkpoint(tmp_path: Path, steps: list[int]):
    pipeline = load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES)).pipeline
    job = Job(
        kind="policy",
        artifact="policy",
        code_version="1",
        inputs={},
        settings={},
        locations={},
        compute=pipeline.recipe.compute,
        recipe={},
        store=tmp_path / "store",
        folder=tmp_path / "job",
    )
    for step in steps:
        (checkpoints_of(job.checkpoints, job.derivation) / f"step-{step:08d}").mkdir(parents=True)
    (checkpoints_of(job.checkpoints, job.derivation) / "step-00000058.partial").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt) as raised, naming_checkpoint(pipeline, job):
        raise KeyboardInterrupt
    place, command = tmp_path / "job", f"`pedigree run {tmp_path / 'small'}`"
    saved = f"interrupted; the checkpoint of step 57 is saved in {place}, and {command} goes on from step 57"
    assert str(raised.value) == (saved if steps else "")
