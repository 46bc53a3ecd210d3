"""The training loop: resume, then step, report, observe and save, until the last step. It knows nothing of the loss.

The order within a step is: step event, checkpoint, observation (which may add eval events). An observation answers no signal,
and may take longer than a run that is asked to stop is given, so nothing that is due to be saved waits for it. Resuming drops
the events that came after the checkpoint, and they are written again, first those of the observation of its step.

A checkpoint that is due while the one before is still being saved waits for the next step; after the last step the run waits
for that save, since what follows, such as writing the policy, may fail. Asked to stop (SIGTERM), a run finishes the step,
saves, and ends with an error that says so; an observation that was due is made after resuming.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator

import torch

from training.checkpoint.async_saver import AsyncSaver
from training.checkpoint.checkpoint import TrainingState
from training.contract.errors import StoreError, TrainingError
from training.contract.protocol.events import EventWriter, Progress
from training.contract.protocol.input_files import check_inputs_unchanged
from training.contract.protocol.job import Job
from training.loop.rank_sync import Flags
from training.loop.run_state import RunState
from training.loop.train_step import TrainStep


class Trainer:
    """Runs the steps of `stepper` for `job`, and notes them in `record`."""

    def __init__(self, job: Job, events: EventWriter, stepper: TrainStep, record: RunState) -> None:
        self._events, self._stepper, self._group, self._record = events, stepper, stepper.group, record
        self._every = job.compute.checkpoint_every
        self._saver = AsyncSaver(record.checkpoints, stepper.group)
        self._checkpoint_is_due = False
        self._saved_step: int | None = None
        self._signals: list[str] = []
        self._state = TrainingState(stepper.masters.parameters, stepper.optimizer, stepper.masters.local_rows)

    def run(self, observe: Callable[[int], None] = lambda step: None) -> None:
        """Take the steps that are left; `observe` is called on every rank, with 0 before the first and after each."""
        batches = self._stepper.batches
        if (pairs := len(batches.items)) < batches.batch_size:
            self._events.note(
                f"`batch_size` {batches.batch_size:,} is more than the {pairs:,} training pairs: every step takes all of them"
            )
        done = self._resume()
        observe(done)
        self._events.phase("training")
        progress = Progress(self._events, self._stepper.steps, "steps", done)
        with _noted_signals() as self._signals:
            for step in range(done + 1, self._stepper.steps + 1):
                flags = self._step(step)
                if flags.stopping:
                    self._stop(step)
                self._save_if_due(step, flags)
                observe(step)
                progress.advance()
            with self._record.timed("checkpoints"):
                self._saver.finish()
            self._note_objective()
            self._stop_if_asked_since()

    def _step(self, step: int) -> Flags:
        """Take a step, emit its event and update the facts; returns the flags of all ranks. Raises TrainingError."""
        flags = Flags(bool(self._signals), self._saver.busy, self._saver.failed)
        try:
            with self._record.timed("training"):
                done = self._stepper.step(step, flags)
        except TrainingError:
            with contextlib.suppress(StoreError):
                self._saver.finish()  # every rank is here; let the last good checkpoint be complete
            raise
        self._events.emit("step", step=step, **done.metrics)
        self._record.add_step(step, self._stepper.steps, done.metrics, self._stepper.batches.tokens(step))
        return done.flags

    def _resume(self) -> int:
        """Restore the last checkpoint, if there is one; returns its step, else 0."""
        step = self._record.resumed_step
        self._events.rewind(step or 0)
        if step is None:
            return 0
        with self._record.timed("resuming"):
            found = self._record.checkpoints.read(step)
            self._state.restore(found.tensors)
            self._stepper.masters.update_model()
            self._record.restore(found.facts)
            self._stepper.objective.restore(self._record.facts.get("objective", {}))
        self._saved_step = step
        self._events.note(f"resumed from the checkpoint of step {step}")
        return step

    def _save_if_due(self, step: int, flags: Flags) -> None:
        """Save when it is time, in a later step if a rank is still saving; all ranks decide alike. Raises StoreError."""
        if flags.failed:
            self._saver.check_saved()
        self._checkpoint_is_due |= step % self._every == 0
        if self._checkpoint_is_due and (not flags.saving or step == self._stepper.steps):
            if flags.saving:
                with self._record.timed("checkpoints"):
                    self._saver.finish()
            self._save(step)
            self._checkpoint_is_due = False

    def _stop_if_asked_since(self) -> None:
        """Stop if a signal came after the flags of the last step were exchanged: writing the model may take long."""
        asked = torch.tensor([float(bool(self._signals))], device=self._group.device)
        if bool(self._group.sum_(asked)):
            self._stop(self._stepper.steps)

    def _stop(self, step: int) -> None:
        """Save and end the run. Raises TrainingError, or StoreError if that cannot be saved."""
        self._saver.finish()
        if self._saved_step != step:
            self._save(step)
            self._saver.finish()
        raise TrainingError(
            f"stopped by {self._signals[-1] if self._signals else 'a signal to another rank'} after step {step} of "
            f"{self._stepper.steps}; checkpoint saved; run again to go on"
        )

    def _save(self, step: int) -> None:
        check_inputs_unchanged()
        self._note_objective()
        with self._record.timed("checkpoints"):
            self._saver.start(step, self._state, self._record.facts)
        self._saved_step = step

    def _note_objective(self) -> None:
        """Among the facts, where they are kept and not in each step: on a GPU reading it waits for the whole step."""
        if state := self._stepper.objective.state():
            self._record.facts["objective"] = state


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[str]]:
    """Within the block SIGTERM, and SIGINT from Ctrl-C, do not end the process; their names are added to the list."""
    noted: list[str] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {
        number: signal.signal(number, lambda got, _: noted.append(signal.Signals(got).name)) for number in numbers
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
