"""The training loop: resume, then step, save and call the callbacks, until the last step. It does not know the loss.

The order within a step is: step event, checkpoint, callbacks (which may add eval events). A callback may take longer than the
grace of a run that was asked to stop, so no due checkpoint waits for a callback. Resuming drops the events after the
checkpoint. They are written again, first those of the callbacks after its step.

A checkpoint that is due while the previous one is still being saved waits for the next step. After the last step the run waits
for the save, since the work that follows may fail. If it is asked to stop (SIGTERM), the run finishes the step, saves, and
raises an error. Callbacks that were due then run after resuming.
"""

import contextlib
import signal
from collections.abc import Iterator, Sequence

import torch

from training.checkpoint.async_saver import AsyncSaver
from training.checkpoint.checkpoint import TrainingState
from training.contract.errors import StoreError, TrainingError
from training.contract.protocol.events import Progress
from training.contract.protocol.input_files import check_inputs_unchanged
from training.job_context import JobContext
from training.loop.callbacks import Callback
from training.loop.rank_sync import Flags
from training.loop.run_state import RunState
from training.loop.train_step import TrainStep


class Trainer:
    """Takes the steps of a job, and keeps their record in `state`."""

    def __init__(
        self,
        context: JobContext,
        train_step: TrainStep,
        state: RunState,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.train_step, self._callbacks = train_step, callbacks
        self._events, self._group, self._run_state = context.events, context.group, state
        self._every = context.job.compute.checkpoint_every
        self._saver = AsyncSaver(state.checkpoints, train_step.group)
        self._checkpoint_is_due = False
        self._saved_step: int | None = None
        self._signals: list[str] = []
        params = train_step.params
        self._training_state = TrainingState(params.parameters, train_step.optimizer, params.local_rows)

    def run(self) -> None:
        """Take the steps that are left. Raise TrainingError if the run must not go on, or was asked to stop."""
        batches = self.train_step.batches
        if (pairs := len(batches.items)) < batches.batch_size:
            self._events.note(
                f"`batch_size` {batches.batch_size:,} is more than the {pairs:,} training pairs: every step takes all of them"
            )
        done = self._resume()
        for callback in self._callbacks:
            callback.on_train_begin(done)
        self._events.phase("training")
        progress = Progress(self._events, self.train_step.steps, "steps", done)
        with _recorded_signals() as self._signals:
            for step in range(done + 1, self.train_step.steps + 1):
                flags = self._step(step)
                if flags.stopping:
                    self._stop(step)
                self._save_if_due(step, flags)
                for callback in self._callbacks:
                    callback.on_step_end(step)
                progress.advance()
            with self._run_state.timed("checkpoints"):
                self._saver.finish()
            self._record_objective()
            self._stop_if_asked_since()

    def _step(self, step: int) -> Flags:
        """Take a step, emit its event and update the figures. Return the flags of all ranks. Raise TrainingError."""
        flags = Flags(bool(self._signals), self._saver.busy, self._saver.failed)
        try:
            with self._run_state.timed("training"):
                done = self.train_step.step(step, flags)
        except TrainingError:
            with contextlib.suppress(StoreError):
                self._saver.finish()  # every rank is here; let the last good checkpoint be complete
            raise
        self._events.emit("step", step=step, **done.metrics)
        self._run_state.add_step(step, self.train_step.steps, done.metrics, self.train_step.batches.tokens(step))
        return done.flags

    def _resume(self) -> int:
        """Restore the last checkpoint. Return its step, or 0 if there is no checkpoint."""
        step = self._run_state.resumed_step
        self._events.rewind(step or 0)
        if step is None:
            return 0
        with self._run_state.timed("resuming"):
            found = self._run_state.checkpoints.read(step)
            self._training_state.restore(found.tensors)
            self.train_step.params.update_model()
            self._run_state.restore(found.facts)
            self.train_step.objective.restore(self._run_state.figures.objective or {})
        self._saved_step = step
        self._events.note(f"resumed from the checkpoint of step {step}")
        return step

    def _save_if_due(self, step: int, flags: Flags) -> None:
        """Save if it is time. Wait for a later step if a rank is still saving. All ranks decide alike. Raise StoreError."""
        if flags.failed:
            self._saver.check_saved()
        self._checkpoint_is_due |= step % self._every == 0
        if self._checkpoint_is_due and (not flags.saving or step == self.train_step.steps):
            if flags.saving:
                with self._run_state.timed("checkpoints"):
                    self._saver.finish()
            self._save(step)
            self._checkpoint_is_due = False

    def _stop_if_asked_since(self) -> None:
        """Stop if a signal came after the last exchange of flags: writing the model may take long."""
        asked = torch.tensor([float(bool(self._signals))], device=self._group.device)
        if bool(self._group.sum_(asked)):
            self._stop(self.train_step.steps)

    def _stop(self, step: int) -> None:
        """Save and end the run. Raise TrainingError, or StoreError if the save fails."""
        self._saver.finish()
        if self._saved_step != step:
            self._save(step)
            self._saver.finish()
        raise TrainingError(
            f"stopped by {self._signals[-1] if self._signals else 'a signal to another rank'} after step {step} of "
            f"{self.train_step.steps}; checkpoint saved; run again to go on",
            "stopped",
        )

    def _save(self, step: int) -> None:
        check_inputs_unchanged()
        self._record_objective()
        with self._run_state.timed("checkpoints"):
            self._saver.start(step, self._training_state, self._run_state.figures.to_json())
        self._saved_step = step

    def _record_objective(self) -> None:
        """Add the objective's state to the figures, only before a save: on a GPU, reading it waits for the step."""
        if state := self.train_step.objective.state():
            self._run_state.figures.objective = state


@contextlib.contextmanager
def _recorded_signals() -> Iterator[list[str]]:
    """Keep SIGTERM and SIGINT from ending the process within the block. Yield the list of the signals' names."""
    recorded: list[str] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {
        number: signal.signal(number, lambda got, _: recorded.append(signal.Signals(got).name)) for number in numbers
    }
    try:
        yield recorded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
