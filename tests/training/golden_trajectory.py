"""The golden trajectory: the metrics of 50 steps of preference tuning, kept in a file, so that a test notices changes.

    python -m tests.training.golden_trajectory      # accept the current trajectory; commit the file with the reason

The run is the real `policy` job on the tiny model of worlds.py: 38 pairs, batches of 8, so ten epochs and ten smaller batches.
AdamW with decay, warm-up and cosine; clipping in most steps; micro-batches of 128 tokens; one thread.

CPUs differ in the last bits. To measure it, run the test with `ATEN_CPU_CAPABILITY=default` or `avx2` (torch's kernels) and
`MKL_CBWR=COMPATIBLE` or `AVX2` (matrix products). A loss differed by 1.3e-6 at most, a margin by 2.5e-6, and a gradient norm by
a relative 2e-6.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests import factories
from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.config.training import Training
from training.contract.protocol.events import EventWriter, read_events
from training.contract.protocol.job import Job
from training.jobs.policy import run

FILE = Path(__file__).parent / "golden" / "trajectory.json"
SERIES = ("loss", "rewards/margins", "grad_norm")
SETTINGS: dict[str, Any] = {
    "loss": {"beta": 0.5},
    "batch_size": 8,
    "micro_tokens": 128,
    "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.1},
    "schedule": {"type": "cosine", "warmup_ratio": 0.1},
    "max_steps": 50,
}


def trajectory(folder: Path, **changes: Any) -> dict[str, Any]:
    """Train in `folder`. Return each series, one number per step, and the fingerprint of the trained weights."""
    job: Job = build_tiny_inputs(folder).job(
        "policy", Training.model_validate(SETTINGS | changes).model_dump(mode="json")
    )
    made = run(factories.context(job, events=EventWriter(job.events)))
    steps = [cast(dict[str, Any], event) for event in read_events(job.events) if event["event"] == "step"]
    return {name: [step[name] for step in steps] for name in SERIES} | {"policy": made.fingerprint}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = trajectory(Path(folder))
    kept = {"torch": torch.__version__.split("+")[0]} | {name: found[name] for name in SERIES}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{FILE} written: {len(found['loss'])} steps, last loss {found['loss'][-1]}\n")


if __name__ == "__main__":
    main()
