"""How a run that a person stops ends: cancelled, with one line that says what is kept and how to go on.

Dagster interrupts a body with an exception, and records a stack trace of it for the asset and another one for the run. Neither
tells anything, since the exception comes from outside.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from assets.execution.asset_context import AssetContext
from assets.pipeline.pipeline import Pipeline
from training.contract.protocol.job import Job, checkpoints_of, committed_steps

INTERRUPTS = (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)
_KEPT = "interrupted; what was finished is kept, and {} goes on from there"
INTERRUPTED = _KEPT.format("the same command")
_BY_COMMAND = "Ctrl-C in `pedigree run`"


def is_interruption(message: str | None) -> bool:
    """Whether a message is that of an interruption."""
    return message is not None and message.startswith("interrupted;")


def without_stack_traces() -> None:
    """Let no error of this process have a stack trace from now on: its run ends, and Dagster would record two."""
    sys.tracebacklimit = 0


@contextmanager
def with_stack_traces() -> Iterator[None]:
    """Let errors have stack traces again after the block, whatever was interrupted in it."""
    try:
        yield
    finally:
        if hasattr(sys, "tracebacklimit"):
            del sys.tracebacklimit


@contextmanager
def naming_checkpoint(pipeline: Pipeline, job: Job) -> Iterator[None]:
    """Let an interruption of `job` name the checkpoint that was saved, if there is one."""
    try:
        yield
    except INTERRUPTS as interruption:
        if steps := committed_steps(checkpoints_of(job.checkpoints, job.derivation)):
            raise type(interruption)(
                f"interrupted; the checkpoint of step {steps[-1]:,} is saved in {job.folder}, and "
                f"`pedigree run {pipeline.argument}` goes on from step {steps[-1]:,}"
            ) from None
        raise


@contextmanager
def ending_in_words(step: AssetContext) -> Iterator[None]:
    """Let an interruption of `step` end its run in words. A command that was interrupted cancels its run."""
    try:
        yield
    except INTERRUPTS as interruption:
        without_stack_traces()
        words = str(interruption) or _KEPT.format(f"`pedigree run {step.pipeline.argument}`")
        step.context.log.warning(f"{step.asset}: {words}")
        if step.services.is_command:
            cancel(step.context.instance, step.context.run.run_id)
        raise type(interruption)(words) from None


def cancel(instance: dg.DagsterInstance, run_id: str) -> None:
    """Mark the run of an interrupted command as one that a person stops, or has stopped if it has ended by now."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    if run.status == dg.DagsterRunStatus.STARTED:
        instance.report_run_canceling(run, _BY_COMMAND)
    elif run.status == dg.DagsterRunStatus.FAILURE:
        instance.report_run_canceled(run, _BY_COMMAND)
