"""The record of a run: what it must remember besides weights and optimizer, and the checkpoint it resumes from.

`facts` are plain JSON and go into every checkpoint. So a run that was killed and resumed ends with the same facts as one that
was never interrupted, but for seconds and memory.

The checkpoint is looked for before anything is loaded, since what has to be done before training depends on it.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from training.checkpoint.checkpoint import Checkpoints
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.distributed import Group
from training.loop.train_step import peak_memory_mb

_CURVE_POINTS = 200


class RunState:
    """The record of the run of `job`; `curves` names the metrics of which some 200 values are kept among the facts.

    `resumed_step`: the step of the last whole checkpoint; None if there is none, so the run starts from the beginning.
    """

    def __init__(self, job: Job, group: Group, events: EventWriter, curves: tuple[str, ...]) -> None:
        self._device = group.device
        self.facts: dict[str, Any] = {
            "steps": 0,
            "tokens": 0,
            "peak_memory_mb": 0.0,
            "seconds": {},
            "peaks_mb": {},
            "train": {},
            "series": {name: [] for name in ("steps", *curves)},
        }
        self.checkpoints = Checkpoints(job.checkpoints, job.derivation, job.compute.keep_checkpoints)
        with self.timed("resuming"):
            self.resumed_step = self.checkpoints.last_whole(group, events.note)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to those of `phase`, and note the peak of this process' memory so far."""
        started = time.perf_counter()
        yield
        self._add_seconds(phase, time.perf_counter() - started)

    def add_step(self, step: int, steps: int, metrics: dict[str, float], tokens: int) -> None:
        """Note that `step` of a run of `steps` was taken."""
        facts, series = self.facts, self.facts["series"]
        facts["steps"] = step
        facts["tokens"] += tokens
        facts["peak_memory_mb"] = max(facts["peak_memory_mb"], metrics["peak_memory_mb"])
        facts["train"] = metrics
        if step % -(-steps // _CURVE_POINTS) == 0 or step in (1, steps):
            series["steps"].append(step)
            for name in series.keys() - {"steps"}:
                series[name].append(metrics[name])

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from the facts of a checkpoint."""
        before = self.facts["seconds"]
        self.facts.update(saved)
        for phase, seconds in before.items():
            self._add_seconds(phase, seconds)

    def _add_seconds(self, phase: str, seconds: float) -> None:
        total = self.facts["seconds"]
        total[phase] = total.get(phase, 0.0) + seconds
        self.facts["peaks_mb"][phase] = peak_memory_mb(self._device)
