"""End of a run that is interrupted during a materialization, and the checkpoint in its message."""

import signal
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from assets.execution.asset_context import AssetContext
from assets.execution.interruption import explain_interruption, naming_checkpoint, with_stack_traces
from tests import factories
from tests.workflows.homes import ATTRIBUTES, write_recipe
from training.contract.protocol.job import checkpoints_of
from workflows.orchestration.resources import build_services
from workflows.recipes.discovery import load_recipe


@pytest.mark.parametrize(("is_command", "status"), [(True, "CANCELED"), (False, "FAILURE")])
def test_interrupted_run_ends_without_stack_traces(tmp_path: Path, is_command: bool, status: str):
    """Only a command's run is canceled. Runs of a stopped server fail, so that the automation starts them again."""
    pipeline = load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES)).pipeline
    services = replace(build_services(tmp_path / "home"), is_command=is_command)

    @dg.asset
    def interrupted(context: dg.AssetExecutionContext) -> None:
        with explain_interruption(AssetContext(pipeline, services, context)):
            signal.raise_signal(signal.SIGINT)

    with dg.DagsterInstance.ephemeral() as instance:
        with with_stack_traces():
            result = dg.materialize([interrupted], instance=instance, raise_on_error=False)
        assert instance.get_run_by_id(result.run_id).status == dg.DagsterRunStatus(status)
    [failure] = result.filter_events(lambda event: event.is_step_failure)
    error = failure.step_failure_data.error
    assert "interrupted; " in error.message and f"`pedigree run {tmp_path / 'small'}`" in error.message
    assert (error.stack, error.cause, error.context) == ([], None, None)


@pytest.mark.parametrize("steps", [[], [50, 57]])
def test_interrupted_job_names_its_last_complete_checkpoint(tmp_path: Path, steps: list[int]):
    pipeline = load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES)).pipeline
    job = factories.job("policy", tmp_path, compute=pipeline.recipe.compute)
    for step in steps:
        (checkpoints_of(job.checkpoints, job.derivation) / f"step-{step:08d}").mkdir(parents=True)
    (checkpoints_of(job.checkpoints, job.derivation) / "step-00000058.partial").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt) as raised, naming_checkpoint(pipeline, job):
        raise KeyboardInterrupt
    message = str(raised.value)
    if not steps:
        assert message == ""
        return
    assert message.startswith("interrupted; ") and "step 57" in message and "step 58" not in message
    assert str(tmp_path / "job") in message and f"`pedigree run {tmp_path / 'small'}`" in message
