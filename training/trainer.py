"""A run of many steps: resume, step, observe, report, save. It knows nothing of what is minimized.

What a run has to remember beside weights and optimizer is `facts`, plain JSON that goes into every checkpoint: so a run
that was killed and taken up again ends with the same facts, but for the seconds, as one that was never disturbed.

The order within a step is: step event, observation (which may add eval events), checkpoint. So a checkpoint's events
are all written before it is committed, and on resuming those after it are forgotten and made again.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training.checkpoint import Checkpoint, Checkpoints, optimizer_tensors, restore_optimizer
from training.contract.events import EventWriter, Progress
from training.contract.job import Input, Job
from training.contract.recipe import Adapter
from training.contract.weights import adapter_fingerprint, weights_fingerprint, weights_identity
from training.distributed import Group
from training.masters import Masters
from training.model.adapter import save_adapter, write_merged
from training.model.load import save_model
from training.stepper import Stepper

_POINTS = 200


def _look_away(step: int) -> None:
    """Observe nothing."""


class Trainer:
    """Runs the steps of `stepper` for `job`; `series` names the metrics of which a thinned course is kept."""

    def __init__(self, job: Job, group: Group, events: EventWriter, stepper: Stepper, series: tuple[str, ...]) -> None:
        self._group, self._events, self._stepper = group, events, stepper
        self._every = job.compute.checkpoint_every
        self._checkpoints = Checkpoints(job.checkpoints, job.derivation)
        self._stride = -(-stepper.steps // _POINTS)
        curves: dict[str, list[float]] = {name: [] for name in series}
        self.facts: dict[str, Any] = {
            "steps": 0,
            "tokens": 0,
            "peak_memory_mb": 0.0,
            "seconds": {},
            "train": {},
            "series": {"steps": []} | curves,
        }

    def run(self, observe: Callable[[int], None] = _look_away) -> None:
        """Take the steps that are left; `observe` is called on every rank, with 0 before the first and after each."""
        done = self._resume()
        if done == 0:
            observe(0)
        self._events.phase("training")
        progress = Progress(self._events, self._stepper.steps, "steps", done)
        for step in range(done + 1, self._stepper.steps + 1):
            self._step(step)
            observe(step)
            if step % self._every == 0:
                self._save(step)
            progress.advance()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to what `facts` says of `phase`."""
        started = time.perf_counter()
        yield
        seconds = self.facts["seconds"]
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started

    def _step(self, step: int) -> None:
        with self.timed("training"):
            metrics = self._stepper.step(step)
        self._events.emit("step", step=step, **metrics)
        facts, series = self.facts, self.facts["series"]
        facts["steps"] = step
        facts["tokens"] += self._stepper.batches.tokens(step)
        facts["peak_memory_mb"] = max(facts["peak_memory_mb"], metrics["peak_memory_mb"])
        facts["train"] = metrics
        if step % self._stride == 0 or step in (1, self._stepper.steps):
            series["steps"].append(step)
            for name in series.keys() - {"steps"}:
                series[name].append(metrics[name])

    def _resume(self) -> int:
        with self.timed("resuming"):
            found = self._checkpoints.resume(self._group, self._events.note)
            if found is None:
                self._events.rewind(-1)
                return 0
            self._stepper.masters.restore(found.model)
            restore_optimizer(self._stepper.optimizer, found.optimizer)
            self.facts.update(found.facts)
        self._events.rewind(found.step)
        self._events.note(f"resumed from the checkpoint of step {found.step}")
        return found.step

    def _save(self, step: int) -> None:
        """Rank 0 writes, while the others go on and wait for it in the next exchange."""
        if not self._group.is_main:
            return
        with self.timed("checkpoints"):
            weights = {name: parameter.detach() for name, parameter in self._stepper.masters.parameters.items()}
            self._checkpoints.save(Checkpoint(step, weights, optimizer_tensors(self._stepper.optimizer), self.facts))


def write_model(job: Job, masters: Masters, start: Input, adapter: Adapter | None = None) -> str:
    """Write the model that ran, or its adapter alone, with the tokenizer into `job.staging`; gives its fingerprint.

    The folder is one of Hugging Face, or of peft. `start` is the model that an adapter is one of.
    """
    shutil.copytree(job.inputs["tokenized_pairs"].folder / "tokenizer", job.staging, dirs_exist_ok=True)
    if adapter is None:
        save_model(masters.model, job.staging)
        return weights_fingerprint(weights_identity(job.staging))
    if not adapter.is_merged:
        return _write_adapter(masters, start, job.staging).fingerprint
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        return write_merged(_write_adapter(masters, start, Path(folder)), start, job.staging)


def _write_adapter(masters: Masters, start: Input, folder: Path) -> Input:
    save_adapter(masters.model, masters.model.state_dict(), folder)
    return Input(kind="policy", fingerprint=adapter_fingerprint(folder, start.fingerprint), folder=folder)
