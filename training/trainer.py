"""A run of many steps: resume, step, observe, report, save. It knows nothing of what is minimized.

What a run has to remember beside weights and optimizer is `facts`, plain JSON that goes into every checkpoint: so a run
that was killed and taken up again ends with the same facts, but for the seconds, as one that was never disturbed.

The order within a step is: step event, observation (which may add eval events), checkpoint. So a checkpoint's events
are all written before it is committed, and on resuming those after it are forgotten and made again.

A checkpoint that is due while the one before is still being saved waits for the next step. Asked to stop (SIGTERM), a run
takes the step to its end, saves, and stops with an error that says so; an observation that is due then is made on resuming.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.agreement import Flags
from training.checkpoint import Checkpoints, State
from training.contract.errors import StoreError, TrainingError
from training.contract.events import EventWriter, Progress
from training.contract.job import Input, Job
from training.contract.recipe import Adapter
from training.contract.weights import adapter_fingerprint, weights_fingerprint, weights_identity
from training.distributed import Group
from training.interruption import Interruption
from training.model.adapter import save_adapter, write_merged
from training.model.load import save_model
from training.parallel.masters import Masters
from training.saver import Saver
from training.stepper import Stepper, peak_memory_mb

_OBSERVED = "observed"
_POINTS = 200


def _look_away(step: int) -> None:
    """Observe nothing."""


class Trainer:
    """Runs the steps of `stepper` for `job`; `series` names the metrics of which a thinned course is kept."""

    def __init__(self, job: Job, group: Group, events: EventWriter, stepper: Stepper, series: tuple[str, ...]) -> None:
        self._group, self._events, self._stepper = group, events, stepper
        self._every = job.compute.checkpoint_every
        self._checkpoints = Checkpoints(job.checkpoints, job.derivation, job.compute.keep_checkpoints)
        self._saver, self._interruption, self._due = Saver(self._checkpoints, group), Interruption(), False
        self._state = State(stepper.masters.parameters, stepper.optimizer, stepper.masters.local_rows)
        self._stride = -(-stepper.steps // _POINTS)
        curves: dict[str, list[float]] = {name: [] for name in series}
        self.facts: dict[str, Any] = {
            "steps": 0,
            "tokens": 0,
            "peak_memory_mb": 0.0,
            "seconds": {},
            "peaks_mb": {},
            "train": {},
            "series": {"steps": []} | curves,
        }

    def run(self, observe: Callable[[int], None] = _look_away) -> None:
        """Take the steps that are left; `observe` is called on every rank, with 0 before the first and after each."""
        done, observed = self._resume()
        if observed < done or done == 0:
            observe(done)
        self._events.phase("training")
        progress = Progress(self._events, self._stepper.steps, "steps", done)
        with self._interruption:
            for step in range(done + 1, self._stepper.steps + 1):
                agreed = self._step(step)
                if agreed.stopping:
                    self._stop(step, observed=step - 1)
                observe(step)
                self._keep(step, agreed)
                progress.advance()
            with self.timed("checkpoints"):
                self._saver.finish()
            self._notice_late()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Have `facts` tell what a block of `phase` took."""
        started = time.perf_counter()
        yield
        self.took(phase, time.perf_counter() - started)

    def took(self, phase: str, seconds: float) -> None:
        """Add to the seconds of `phase`, and note the most memory that this process has held until now."""
        total = self.facts["seconds"]
        total[phase] = total.get(phase, 0.0) + seconds
        self.facts["peaks_mb"][phase] = peak_memory_mb(self._group.device)

    def _step(self, step: int) -> Flags:
        """Take a step and tell of it; what the ranks agreed on in its middle. Raises TrainingError."""
        flags = Flags(self._interruption.noticed is not None, self._saver.busy, self._saver.failed)
        try:
            with self.timed("training"):
                done = self._stepper.step(step, flags)
        except TrainingError:
            with contextlib.suppress(StoreError):
                self._saver.finish()  # every rank is here, and the last good checkpoint shall be there
            raise
        metrics = done.metrics
        self._events.emit("step", step=step, **metrics)
        facts, series = self.facts, self.facts["series"]
        facts["steps"] = step
        facts["tokens"] += self._stepper.batches.tokens(step)
        facts["peak_memory_mb"] = max(facts["peak_memory_mb"], metrics["peak_memory_mb"])
        facts["train"] = metrics
        if state := self._stepper.objective.state():
            facts["objective"] = state
        if step % self._stride == 0 or step in (1, self._stepper.steps):
            series["steps"].append(step)
            for name in series.keys() - {"steps"}:
                series[name].append(metrics[name])
        return done.flags

    def _resume(self) -> tuple[int, int]:
        """Up to which step the run was taken, and observed, when its last checkpoint was saved."""
        with self.timed("resuming"):
            found = self._checkpoints.resume(self._group, self._events.note)
            if found is None:
                self._events.rewind(-1)
                return 0, 0
            self._state.restore(found.tensors)
            self._stepper.masters.update_model()
            observed = found.facts.pop(_OBSERVED)
            before = self.facts["seconds"]
            self.facts.update(found.facts)
            for phase, seconds in before.items():
                self.took(phase, seconds)
            self._stepper.objective.restore(self.facts.get("objective", {}))
        self._events.rewind(found.step)
        self._events.note(f"resumed from the checkpoint of step {found.step}")
        return found.step, observed

    def _keep(self, step: int, agreed: Flags) -> None:
        """Save if it is time to, unless a rank still does; all ranks decide alike. Raises StoreError."""
        if agreed.failed:
            self._saver.demand_saved()
        self._due |= step % self._every == 0
        if self._due and not agreed.saving:
            self._save(step, observed=step)
            self._due = False

    def _notice_late(self) -> None:
        """Stop if a rank was asked to after it told the others in the last step: what is still to be written takes long."""
        asked = torch.tensor([float(self._interruption.noticed is not None)], device=self._group.device)
        if bool(self._group.sum_(asked)):
            self._stop(self._stepper.steps, observed=self._stepper.steps)

    def _stop(self, step: int, observed: int) -> None:
        """Save and end the run. Raises TrainingError, or StoreError if that cannot be saved."""
        self._saver.finish()
        self._save(step, observed)
        self._saver.finish()
        raise TrainingError(
            f"stopped by {self._interruption.noticed or 'a signal to another rank'} after step {step} of "
            f"{self._stepper.steps}; checkpoint saved; run again to go on"
        )

    def _save(self, step: int, observed: int) -> None:
        with self.timed("checkpoints"):
            self._saver.start(step, self._state, {**self.facts, _OBSERVED: observed})


def write_model(job: Job, masters: Masters, start: Input, adapter: Adapter | None = None) -> str:
    """Write the model that ran, or its adapter alone, with the tokenizer into `job.staging`; gives its fingerprint.

    The folder is one of Hugging Face, or of peft. `start` is the model that an adapter is one of. Every rank calls it,
    since each may hold a part of the weights; rank 0 writes, and the others have an empty answer.
    """
    weights = masters.full_weights()
    if not masters.group.is_main:
        return ""
    shutil.copytree(job.inputs["tokenized_pairs"].folder / "tokenizer", job.staging, dirs_exist_ok=True)
    if adapter is None:
        save_model(masters.model, job.staging, weights, masters.dtype)
        return weights_fingerprint(weights_identity(job.staging))
    if not adapter.is_merged:
        return _write_adapter(masters.model, weights, start, job.staging).fingerprint
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        return write_merged(_write_adapter(masters.model, weights, start, Path(folder)), start, job.staging)


def _write_adapter(model: PreTrainedModel, weights: dict[str, Tensor], start: Input, folder: Path) -> Input:
    save_adapter(model, weights, folder)
    return Input(kind="policy", fingerprint=adapter_fingerprint(folder, start.fingerprint), folder=folder)
