"""End of a run that the user stops: canceled, with one line about the kept results and the command to continue.

Dagster interrupts a body with an exception, and records its stack trace twice, for the asset and for the run. Both are useless,
because the exception comes from outside.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import dagster as dg

from assets.execution.asset_context import AssetContext
from assets.pipeline.pipeline import Pipeline
from training.contract.protocol.job import Job, checkpoints_of, committed_steps
from training.launch.engine import Submission

INTERRUPTS = (dg.DagsterExecutionInterruptedError, KeyboardInterrupt)
_KEPT = "interrupted; what was finished is kept, and {} goes on from there"
INTERRUPTED = _KEPT.format("the same command")
_QUEUED = "interrupted; its job goes on in the queue, and `pedigree run {}` follows it"
_TERMINATED = threading.Event()
_BY_COMMAND = "Ctrl-C in `pedigree run`"


def is_interruption(message: str | None) -> bool:
    """Return whether a message reports an interruption."""
    return message is not None and message.startswith("interrupted;")


def without_stack_traces() -> None:
    """Turn off stack traces in this process. Its run ends, and Dagster would record two of them."""
    sys.tracebacklimit = 0


@contextmanager
def with_stack_traces() -> Iterator[None]:
    """Turn stack traces on again after the block, after an interruption too."""
    try:
        yield
    finally:
        if hasattr(sys, "tracebacklimit"):
            del sys.tracebacklimit


@contextmanager
def naming_checkpoint(pipeline: Pipeline, job: Job) -> Iterator[None]:
    """Make an interruption of `job` name the latest saved checkpoint, if any, or say that the job goes on."""
    try:
        yield
    except INTERRUPTS as interruption:
        if Submission.read(job) is not None:
            raise type(interruption)(_QUEUED.format(pipeline.argument)) from None
        if steps := committed_steps(checkpoints_of(job.checkpoints, job.derivation)):
            raise type(interruption)(
                f"interrupted; the checkpoint of step {steps[-1]:,} is saved in {job.folder}, and "
                f"`pedigree run {pipeline.argument}` goes on from step {steps[-1]:,}"
            ) from None
        raise


@contextmanager
def explain_interruption(context: AssetContext) -> Iterator[None]:
    """Make an interruption of `context` end its run with a message. An interrupted command cancels its run."""
    try:
        yield
    except INTERRUPTS as interruption:
        without_stack_traces()
        message = str(interruption) or _KEPT.format(f"`pedigree run {context.pipeline.argument}`")
        context.dagster.log.warning(f"{context.asset}: {message}")
        if context.services.is_command:
            cancel(context.dagster.instance, context.dagster.run.run_id)
        raise type(interruption)(message) from None


def is_canceled(context: AssetContext) -> bool:
    """Return whether the user ends the run: by Ctrl-C in its command, or on Dagster's page. Else its process has to end."""
    if context.services.is_command:
        return not _TERMINATED.is_set()
    run = context.dagster.instance.get_run_by_id(context.dagster.run_id)
    return run is not None and run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


@contextmanager
def noting_sigterm() -> Iterator[None]:
    """Note SIGTERM in the block, before it interrupts. Dagster handles it in the same way as Ctrl-C."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        _TERMINATED.set()
        handler(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def cancel(instance: dg.DagsterInstance, run_id: str) -> None:
    """Mark the run of an interrupted command as canceling, or as canceled if it has ended already."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    if run.status == dg.DagsterRunStatus.STARTED:
        instance.report_run_canceling(run, _BY_COMMAND)
    elif run.status == dg.DagsterRunStatus.FAILURE:
        instance.report_run_canceled(run, _BY_COMMAND)
