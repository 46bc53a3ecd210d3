"""Runs and single steps on a GPU, compared with the CPU and with a second run."""

from typing import Any

import pytest
import torch

from tests import factories
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
    """Run the job, with its reference check and held-out pairs. Return its step events.

    On a CPU, policies in bfloat16 differ from the float32 table by 0.05 nats per response.
    """
    with group(job.compute.device) as alone:
        made = run(factories.context(job, alone, EventWriter(job.events, keep=True)))
    assert made.details.step0_apart < 0.5
    return told(job)


def test_policy_in_float32_on_gpu_matches_cpu(tiny_inputs):
    """A float32 loss depends on the order of sums by 1e-6, and AdamW amplifies that over twelve steps."""
    on_gpu, on_cpu = (
        tune(tiny_inputs.job("policy", settings(), name, device=device))
        for name, device in (("gpu", "cuda"), ("cpu", "cpu"))
    )
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert [one[name] for name in SERIES] == pytest.approx([other[name] for name in SERIES], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_policy_on_gpu_twice_gives_the_same_bits(tiny_inputs, precision: str):
    """In bfloat16 one kernel call runs the attention of a row; `tune` compares its results with the table."""
    runs = [tune(tiny_inputs.job("policy", settings(precision=precision), name, device="cuda")) for name in "ab"]
    assert [[step[name] for name in SERIES] for step in runs[0]] == [
        [step[name] for name in SERIES] for step in runs[1]
    ]


@pytest.mark.parametrize(
    "loss", [{}, {"ld_alpha": 0.3}, {"weighting": "wpo"}, {"type": "aot"}, {"type": "bco_pair"}], ids=str
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_step_on_gpu_waits_in_sync_step_only(tiny_inputs, loss: dict[str, Any], precision: str):
    """torch raises for each wait, on all threads. A second step runs up to `sync_step`, and from there to its end."""
    with group("cuda") as alone:
        stepper = stepper_of(tiny_inputs, alone.device, loss=loss, precision=precision)
    stepper.step(1, Flags())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing") as stopped:
            stepper.step(2, Flags())
        stepper._apply(norm=1.0, factor=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "sync_step" in [entry.name for entry in stopped.traceback]
