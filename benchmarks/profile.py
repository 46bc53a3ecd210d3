"""Time profile of a training job: `python -m benchmarks.profile DATA`.

The workload of training.py, our side only, each table from a process of its own:

phases       of the policy job from `python` to the published artifact, by the job's own events; wall-clock seconds, so other
             work on the machine counts
operators    of the training steps: the self time of every operator, by torch's profiler, under the heading of the
             innermost range or operator around it that has one; a backward operator counts under the heading of its forward.
             The time outside of operators is Python's. The profiler slows small operators down: look at the shares
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function
from transformers import AttentionInterface

from benchmarks.setting import machine, run, table
from benchmarks.training import arguments_of
from benchmarks.workload import policy_job, prepare, reference_job
from training import main as entry
from training.contract.protocol.artifacts import POLICY
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.distributed import group
from training.loop.rank_sync import Flags
from training.loop.train_step import StepResult, TrainStep
from training.model.attention import packed_attention
from training.model.logprobs.response_logprobs import response_logprobs

# The beginning of names of operators and ranges, and their heading; the first that fits, from the inside out.
HEADINGS = {
    "attention": "attention",
    "lay out": "packing and plan",
    "_TokenLogProbsBackward": "head, backward",
    "_TokenLogProbs": "head, forward",
    "aten::linear": "linear layers of the body",
    "aten::embedding": "embedding",
    "Optimizer.step": "optimizer",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad": "adding gradients up",
    "aten::linalg_vector_norm": "norm and clipping of the gradient",
    "aten::_foreach": "norm and clipping of the gradient",
}
REST = "norms, rotary positions, activations, residuals"
PYTHON = "Python between operators"
BACKWARD = "autograd::engine::evaluate_function"


def heading(event: Any) -> str | None:
    """Return the heading of the innermost event around `event`, itself included, that has one."""
    while event is not None:
        for start, shown in HEADINGS.items():
            if event.name.startswith((start, f"{BACKWARD}: {start}")):
                return shown
        event = event.cpu_parent
    return None


def shares(events: Any) -> Counter[str]:
    """Return microseconds by heading."""
    forward = {
        e.sequence_nr: shown for e in events if e.sequence_nr >= 0 and _backward_of(e) < 0 and (shown := heading(e))
    }
    found: Counter[str] = Counter()
    for event in events:
        shown = PYTHON if event.name == "step" else heading(event) or forward.get(_backward_of(event)) or REST
        found[shown] += event.self_cpu_time_total
    return found


def _backward_of(event: Any) -> int:
    """Return the number that ties the backward operator around `event` to its forward; -1 without such an operator."""
    while event is not None and not event.name.startswith(BACKWARD):
        event = event.cpu_parent
    return -1 if event is None else int(event.sequence_nr)


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def within(*given: Any, **named: Any) -> Any:
        with record_function(name):
            return function(*given, **named)

    return within


def profile_steps(job: Job) -> Counter[str]:
    """Run `job` with the profiler on in its steps."""
    found: Counter[str] = Counter()
    take = ranged("step", TrainStep.step)

    def watched(stepper: TrainStep, step: int, flags: Flags) -> StepResult:
        with profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as watch:
            taken: StepResult = take(stepper, step, flags)
        found.update(shares(watch.events()))
        return taken

    TrainStep.step = watched  # type: ignore[method-assign, assignment]
    response_logprobs.build_row = ranged("lay out", response_logprobs.build_row)  # type: ignore[attr-defined]
    AttentionInterface.register(packed_attention.SHARED_PREFIX, ranged("attention", packed_attention.attend))
    with group("cpu") as alone:
        entry.make(job, alone)
    return found


def phases(job: Job, cost: dict[str, float]) -> Iterator[tuple[str, float]]:
    yield "start of Python, imports", cost["imports_cpu_seconds"]
    made = Store(job.store).find(POLICY, job.derivation.key)
    assert made is not None
    seconds = {name: s for name, s in made.details.seconds.items() if s >= 0.005}
    yield from seconds.items()
    yield "hashing, publishing, events", cost["seconds"] - sum(seconds.values())


def shown(name: str, unit: str, parts: list[tuple[str, float]]) -> str:
    total = sum(value for _, value in parts)
    ordered = sorted(parts, key=lambda part: -part[1])
    return table(
        [[name, unit, "share"], *([n, f"{v:.2f}", f"{v / total:.1%}"] for n, v in ordered), ["", f"{total:.2f}", ""]]
    )


def main() -> int:
    if sys.argv[1:2] == ["--job"]:
        sys.stdout.write(json.dumps(profile_steps(Job.read(Path(sys.argv[2])))) + "\n")
        return 0
    arguments = arguments_of(__doc__)
    threads = arguments.threads
    with tempfile.TemporaryDirectory() as folder:
        workload, pairs = prepare(arguments.data, Path(folder))
        scored = workload.run(reference_job(workload, pairs))
        job = policy_job(workload, pairs, scored, arguments.micro_tokens)
        cost = run("measured", str(job.path), threads=threads)
        rows = list(phases(job, cost))
        by_heading = run("profile", "--job", str(job.path), threads=threads)
    sys.stdout.write(f"{machine(threads)}\n\n{shown('phase', 'seconds', rows)}\n")
    sys.stdout.write(shown("operators of the steps", "seconds", [(n, us / 1e6) for n, us in by_heading.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
