"""What two real ranks know after they told each other, against numbers by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

RANK = """
import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from training.agreement import Flags, agree
from training.distributed import Group

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
own, suspect = Group(rank, 2, torch.device("cpu")), torch.tensor(rank == 1)
for flag in ("stopping", "saving", "failed"):
    sums_M = torch.tensor([1.0 + rank, 10.0], dtype=torch.float64)
    found = agree(own, sums_M, 100.0 + 50 * rank, suspect, Flags(**{flag: rank == 1}), lambda: torch.tensor(3.5))
    print(json.dumps(asdict(found)))
dist.destroy_process_group()
"""


def test_each_rank_knows_what_either_said(tmp_path: Path):
    """Rank r says 1 + r and 10 and has used 100 + 50 r MB; rank 1 alone is suspect, and raises one flag after the other."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
    first, second = (rank.communicate(timeout=120)[0].splitlines() for rank in ranks)
    flags = ("stopping", "saving", "failed")
    same = {"sums": [3, 20], "memory_mb": 150, "suspects": [1], "norm": 3.5}
    assert first == second
    assert list(map(json.loads, first)) == [same | {"flags": {f: f == raised for f in flags}} for raised in flags]
