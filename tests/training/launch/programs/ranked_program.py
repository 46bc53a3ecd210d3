"""training.main with other work in its table: what `settings["act"]` says, on every rank, by the real group and launcher."""

import os
import sys
import time
from pathlib import Path

import torch

from training import main
from training.contract.errors import TrainingError
from training.contract.events import EventWriter
from training.contract.job import Job
from training.contract.store import Made
from training.distributed import Group


def act(job: Job, group: Group, events: EventWriter) -> Made:
    pids = group.gather_rows(torch.tensor([[os.getpid(), os.getppid()]]))
    torchrun = int(pids[0, 1])
    supervisor = int(Path(f"/proc/{torchrun}/stat").read_text().rpartition(")")[2].split()[1])
    events.emit("note", ranks=pids[:, 0].tolist(), torchrun=torchrun, supervisor=supervisor)
    if job.settings["act"] == "train_for_ever":
        while True:
            group.sum_(torch.ones(1000))
            time.sleep(0.01)
    if job.settings["act"] == "rank_1_refuses" and group.rank == 1:
        raise TrainingError("the loss at step 0 is 0.7, expected ln 2")
    if job.settings["act"] == "rank_1_breaks" and group.rank == 1:
        raise IndexError("row 12 of 10")
    group.barrier()
    (job.staging / f"rank-{group.rank}.txt").write_text(f"{group.rank} of {group.world}")
    return Made(fingerprint="f" * 64, details={"ranks": group.world})


if __name__ == "__main__":
    main.WORK["policy"] = act
    sys.exit(main.main(Path(sys.argv[1])))
