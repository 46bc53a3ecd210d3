"""What only a GPU can show: whole runs and single steps on one, against the processor and against themselves."""

from typing import Any

import pytest
import torch

from tests.training.loop.test_waits import stepper_of
from tests.training.runs import settings, told
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.distributed import group
from training.jobs.policy import run
from training.loop.rank_sync import Flags

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SERIES = ("loss", "rewards/margins", "logps/chosen", "grad_norm")


def tune(job: Job) -> list[dict[str, Any]]:
    """Do the job, step 0's proof and held-out pairs included; what it told of each step.

    Policies in bfloat16 are 0.05 nats a response from the table, which is in float32, on a processor.
    """
    with group(job.compute.device) as alone:
        made = run(job, alone, EventWriter(job.events, keep=True))
    assert made.details.get("step0_apart", 0.0) < 0.5
    return told(job)


def test_a_run_in_float32_is_that_of_the_processor(tiny_world):
    """Twelve steps; a loss in float32 depends on the order of sums by 1e-6, and AdamW makes more of it step by step."""
    there, here = (
        tune(tiny_world.job("policy", settings(), name, device=device))
        for name, device in (("there", "cuda"), ("here", "cpu"))
    )
    for one, other in zip(there, here, strict=True):
        assert [one[name] for name in SERIES] == pytest.approx([other[name] for name in SERIES], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_seed_gives_the_same_bits_twice(tiny_world, precision: str):
    """In bfloat16 attention is one call of a kernel for the row, which `tune` holds against the table."""
    runs = [tune(tiny_world.job("policy", settings(precision=precision), name, device="cuda")) for name in "ab"]
    assert [[step[name] for name in SERIES] for step in runs[0]] == [
        [step[name] for name in SERIES] for step in runs[1]
    ]


@pytest.mark.parametrize(
    "loss", [{}, {"ld_alpha": 0.3}, {"weighting": "wpo"}, {"type": "aot"}, {"type": "bco_pair"}], ids=str
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_nothing_waits_for_the_gpu_but_the_ranks_agreement(tiny_world, loss: dict[str, Any], precision: str):
    """torch refuses what waits, on all threads: a second step comes as far as its middle, and from there to its end."""
    with group("cuda") as alone:
        stepper = stepper_of(tiny_world, alone.device, loss=loss, precision=precision)
    stepper.step(1, Flags())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing") as stopped:
            stepper.step(2, Flags())
        stepper._apply(norm=1.0, factor=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "agree" in [entry.name for entry in stopped.traceback]
