"""What two real ranks know after they told each other, against numbers by hand."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.training.runs import on_two_ranks
from training.distributed import Group
from training.loop.rank_sync import Flags, sync_step

FLAGS = ("stopping", "saving", "failed")


def told(own: Group) -> list[dict[str, Any]]:
    found = []
    for flag in FLAGS:
        sums_M = torch.tensor([1.0 + own.rank, 10.0], dtype=torch.float64)
        suspect, flags = torch.tensor(own.rank == 1), Flags(**{flag: own.rank == 1})
        found.append(asdict(sync_step(own, sums_M, 100.0 + 50 * own.rank, suspect, flags, lambda: torch.tensor(3.5))))
    return found


def test_each_rank_knows_what_either_said(tmp_path: Path):
    """Rank r says 1 + r and 10 and has used 100 + 50 r MB; rank 1 alone is suspect, and raises one flag after the other."""
    first, second = on_two_ranks(tmp_path, told)
    same = {"sums": [3, 20], "memory_mb": 150, "suspects": [1], "norm": 3.5}
    assert first == second == [same | {"flags": {f: f == raised for f in FLAGS}} for raised in FLAGS]
