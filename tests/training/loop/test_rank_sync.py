"""The exchange of a step between two real ranks, against numbers by hand."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.training.runs import on_two_ranks
from training.distributed import Group
from training.loop.rank_sync import Flags, sync_step

FLAGS = ("stopping", "saving", "failed")


def sync_each_flag(group: Group) -> list[dict[str, Any]]:
    results = []
    for flag in FLAGS:
        sums_M = torch.tensor([1.0 + group.rank, 10.0], dtype=torch.float64)
        suspect, flags = torch.tensor(group.rank == 1), Flags(**{flag: group.rank == 1})
        memory_mb = 100.0 + 50 * group.rank
        results.append(asdict(sync_step(group, sums_M, memory_mb, suspect, flags, lambda: torch.tensor(3.5))))
    return results


def test_sync_step_gives_every_rank_sums_maximum_suspects_and_flags(tmp_path: Path):
    """Rank r gives 1 + r and 10, and has used 100 + 50 r MB. Only rank 1 is suspect; it raises one flag after the other."""
    first, second = on_two_ranks(tmp_path, sync_each_flag)
    same = {"sums": [3, 20], "memory_mb": 150, "suspects": [1], "norm": 3.5}
    assert first == second == [same | {"flags": {f: f == raised for f in FLAGS}} for raised in FLAGS]
