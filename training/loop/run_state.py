"""The state of a run besides weights and optimizer, and the checkpoint from which it resumes.

`facts` are plain JSON and go into every checkpoint. So a resumed run ends with the same facts as an uninterrupted one, except
seconds and memory.
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
    """The state of a job's run. The facts keep about 200 values of each metric in `curves`.

    `resumed_step` is the step of the last intact checkpoint, or None. It is known before any model is loaded, because the
    preparation of a run depends on it.
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
        """Add the seconds of the block to `phase`, and record the peak memory of this process so far."""
        started = time.perf_counter()
        yield
        self._add_seconds(phase, time.perf_counter() - started)

    def add_step(self, step: int, steps: int, metrics: dict[str, float], tokens: int) -> None:
        """Record that `step` of `steps` was taken."""
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
        """Continue from the facts of a checkpoint, and add the seconds of this process to them."""
        seconds_so_far = self.facts["seconds"]
        self.facts.update(saved)
        for phase, seconds in seconds_so_far.items():
            self._add_seconds(phase, seconds)

    def _add_seconds(self, phase: str, seconds: float) -> None:
        total = self.facts["seconds"]
        total[phase] = total.get(phase, 0.0) + seconds
        self.facts["peaks_mb"][phase] = peak_memory_mb(self._device)
