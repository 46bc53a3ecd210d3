"""training.main with other work for the policy job, on every rank of a real launcher. `code_version` selects the work.

A rank imports torch, but not the modules of training: they take longer than all the work here.
"""

import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from training import main
from training.contract.errors import TrainingError
from training.contract.protocol.job import Job
from training.contract.store.artifact import JobResult
from training.contract.store.artifact_kind import Details
from training.distributed import Group, mesh_of
from training.job_context import JobContext


def run(context: JobContext) -> JobResult:
    job, group = context.job, context.group
    if job.code_version == "exchange":
        return exchange(job, group)
    pids = group.gather_rows(torch.tensor([[os.getpid(), os.getppid()]]))
    torchrun = int(pids[0, 1])
    supervisor = int(Path(f"/proc/{torchrun}/stat").read_text().rpartition(")")[2].split()[1])
    context.events.emit("note", ranks=pids[:, 0].tolist(), torchrun=torchrun, supervisor=supervisor)
    if job.code_version == "train_for_ever":
        while True:
            group.sum_(torch.ones(1000))
            time.sleep(0.01)
    if job.code_version == "rank_1_refuses" and group.rank == 1:
        raise TrainingError("the loss at step 0 is 0.7, expected ln 2")
    if job.code_version == "read_a_truncated_map" and group.rank == 1:
        read_truncated_map(job.inputs["base_model"].folder / "model.safetensors")
    if job.code_version == "break":
        raise IndexError("row 12 of 10")
    while job.code_version == "wait_for_go" and not (job.folder / "go").exists():
        time.sleep(0.05)
    group.barrier()
    (job.staging / f"rank-{group.rank}.txt").write_text(f"{group.rank} of {group.world}")
    return JobResult(fingerprint="f" * 64, details=Details(notes=(f"{group.world} ranks",)))


def read_truncated_map(file: Path) -> None:
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        os.truncate(file, 0)
        mapped[0]


def exchange(job: Job, group: Group) -> JobResult:
    """Call every collective once. Write the results of each rank as JSON to the job's folder."""
    own = group.rank + 1
    rows = {
        "unequal": torch.arange(own * 2).view(own, 2) + 10 * own,
        "none_on_rank_0": torch.full((group.rank, 3), 0.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True])[:own],
        "halves": torch.tensor([[1.5 * own]], dtype=torch.bfloat16),
        "transposed": (torch.arange(6).view(2, 3) + 100 * group.rank).T,
    }
    got = {name: group.gather_rows(tensor) for name, tensor in rows.items()}
    assert all(got[name].dtype == tensor.dtype for name, tensor in rows.items())
    got["sum"] = torch.tensor([1.0, 10.0]) * own
    got["broadcast"] = torch.tensor([7, 8]) * own
    assert group.sum_(got["sum"]) is got["sum"]
    assert group.broadcast_(got["broadcast"]) is got["broadcast"]
    report: dict[str, Any] = {name: tensor.tolist() for name, tensor in got.items()}
    mesh = mesh_of(group, {"all": group.world, "alone": 1})
    backends = {name: mesh[name].get_group()._get_backend(group.device) for name in ("all", "alone")}
    report["waits"] = {name: backend.options._timeout.total_seconds() for name, backend in backends.items()}
    (job.folder / f"got-{group.rank}.json").write_text(json.dumps(report))
    return JobResult(fingerprint="e" * 64)


if __name__ == "__main__":
    main.WORK["policy"] = "ranked_program"
    sys.exit(main.main(Path(sys.argv[1])))
