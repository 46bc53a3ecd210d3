"""The state of a run besides weights and optimizer, and the checkpoint from which it resumes.

The figures go into every checkpoint as JSON. So a resumed run ends with the same figures as an uninterrupted one, except
seconds and memory.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace

from training.checkpoint.checkpoint import Checkpoints
from training.contract.config.json_object import JsonObject
from training.job_context import JobContext
from training.loop.train_step import peak_memory_mb

_CURVE_POINTS = 200


@dataclass
class RunFigures:
    """The figures of a run so far; most become details of its artifact (training.contract.protocol.details).

    `step0_apart`: nats a response between policy and table before training, if their dtypes differ. `objective`: the state of
    a loss that depends on earlier batches.
    """

    steps: int = 0
    tokens: int = 0
    peak_memory_mb: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    peaks_mb: dict[str, float] = field(default_factory=dict)
    train: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    step0_loss: float | None = None
    step0_expected: float | None = None
    step0_allowed: float | None = None
    step0_apart: float | None = None
    eval: dict[str, float] | None = None
    objective: dict[str, float] | None = None

    def to_json(self) -> JsonObject:
        """Return a copy as JSON, without fields that are not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class RunState:
    """The state of a job's run. The figures keep about 200 values of each metric in `curves`.

    `resumed_step` is the step of the last intact checkpoint, or None. It is known before any model is loaded, because the
    preparation of a run depends on it.
    """

    def __init__(self, context: JobContext, curves: tuple[str, ...]) -> None:
        job, group = context.job, context.group
        self._device = group.device
        self.figures = RunFigures(series={name: [] for name in ("steps", *curves)})
        self.checkpoints = Checkpoints(job.checkpoints, job.derivation, job.compute.keep_checkpoints)
        with self.timed("resuming"):
            self.resumed_step = self.checkpoints.last_whole(group, context.events.note)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to `phase`, and record the peak memory of this process so far."""
        started = time.perf_counter()
        yield
        self._add_seconds(phase, time.perf_counter() - started)

    def add_step(self, step: int, steps: int, metrics: dict[str, float], tokens: int) -> None:
        """Record that `step` of `steps` was taken."""
        figures, series = self.figures, self.figures.series
        figures.steps = step
        figures.tokens += tokens
        figures.peak_memory_mb = max(figures.peak_memory_mb, metrics["peak_memory_mb"])
        figures.train = metrics
        if step % -(-steps // _CURVE_POINTS) == 0 or step in (1, steps):
            series["steps"].append(step)
            for name in series.keys() - {"steps"}:
                series[name].append(metrics[name])

    def restore(self, saved: JsonObject) -> None:
        """Continue from the figures of a checkpoint, and add the seconds of this process to them."""
        seconds_so_far = self.figures.seconds
        known = {each.name for each in fields(RunFigures)}
        self.figures = replace(self.figures, **{name: value for name, value in saved.items() if name in known})
        for phase, seconds in seconds_so_far.items():
            self._add_seconds(phase, seconds)

    def _add_seconds(self, phase: str, seconds: float) -> None:
        total = self.figures.seconds
        total[phase] = total.get(phase, 0.0) + seconds
        self.figures.peaks_mb[phase] = peak_memory_mb(self._device)
