"""Kernel times of a policy job's steps: `python -m benchmarks.gpu.profile JOB.json`, started by `benchmarks.gpu`.

torch's profiler watches two steps. It slows the processor down, so the device waits longer than usual: only the device's own
milliseconds count. The last line is one JSON object with the rows of a table. A row is a purpose of kernels, with their
milliseconds and their count in a step. The last rows are the sum, and the time between the first start and the last end.
"""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from training import main
from training.contract.protocol.job import Job
from training.contract.system.imports import import_without_gc
from training.distributed import group
from training.loop.rank_sync import Flags
from training.loop.train_step import StepResult, TrainStep

FIRST, STEPS = 6, 2
# Part of a kernel's name, and its purpose; the first that fits.
HEADINGS = {
    "flash": "attention",
    "nvjet": "matrix products",
    "gemm": "matrix products",
    "FusedAdam": "optimizer",
    "FusedOptimizer": "optimizer",
    "multi_tensor_apply": "clipping, and weights copied to bfloat16",
    "unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>": "gradients added up in float32",
    "triton": "made by the compiler",
}
REST = "norms, rotary positions, activations, residuals, head, packing"


def rows_of(events: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Return the table of a trace as torch exports it, in microseconds."""
    done = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found: dict[str, list[float]] = {}
    for event in done:
        heading = next((shown for part, shown in HEADINGS.items() if part in event["name"]), REST)
        found.setdefault(heading, []).append(event["dur"])
    order = sorted(found.items(), key=lambda item: -sum(item[1]))
    rows = [[heading, f"{sum(times) / STEPS / 1000:.1f}", f"{len(times) / STEPS:,.0f}"] for heading, times in order]
    busy = sum(event["dur"] for event in done) / STEPS / 1000
    span = (max(e["ts"] + e["dur"] for e in done) - min(e["ts"] for e in done)) / STEPS / 1000 if done else 0.0
    last = [["all", f"{busy:.1f}", f"{len(done) / STEPS:,.0f}"], ["under the profiler", f"{span:.1f}", ""]]
    return [["a step on the device", "ms", "kernels"], *rows, *last]


def measure(path: Path) -> list[list[str]]:
    job, plain = Job.read(path), TrainStep.step
    import_without_gc(main.WORK[job.kind])
    watch = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def step(stepper: TrainStep, number: int, flags: Flags) -> StepResult:
        if number == FIRST:
            _wait()
            watch.start()
        result = plain(stepper, number, flags)
        if number == FIRST + STEPS - 1:
            _wait()
            watch.stop()
        return result

    TrainStep.step = step  # type: ignore[assignment, method-assign]
    with group(job.compute.device) as alone:
        main.make(job, alone)
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        watch.export_chrome_trace(trace.name)
        return rows_of(json.loads(Path(trace.name).read_bytes())["traceEvents"])


def _wait() -> None:
    """Wait until the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]))) + "\n")
