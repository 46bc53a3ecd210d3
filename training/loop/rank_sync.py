"""Synchronize the ranks in the middle of each step, with one small all-reduce.

    sums       the objective's values, summed over the items
    memory     the greatest memory use of a rank
    suspects   ranks with a non-finite value; all ranks then stop together, before the optimizer step
    flags      whether any rank was asked to stop, still saves a checkpoint, or failed to save one

So all ranks know the same and decide the same. On a GPU these numbers and the gradient norm are copied to the host together.
This is the only place where a step waits for the device (train_step.py).

Legend: M values, F flags, R ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training.distributed import Group
from training.model.device_prefetch import to_device


@dataclass(frozen=True)
class Flags:
    """The flags of one rank; after the exchange, the flags that any rank raised."""

    stopping: bool = False
    saving: bool = False
    failed: bool = False


@dataclass(frozen=True)
class StepSync:
    """The result of the exchange, the same on every rank. `suspects` are the ranks with a non-finite value."""

    sums: list[float]
    memory_mb: float
    suspects: list[int]
    flags: Flags
    norm: float


def sync_step(
    group: Group, sums_M: Tensor, memory_mb: float, suspect: Tensor, flags: Flags, norm: Callable[[], Tensor]
) -> StepSync:
    """Exchange the values of all ranks. `suspect` is a boolean tensor; `norm` returns the norm of the whole gradient.

    The all-reduce sums one vector: M sums, F flags, and R + R places. Each rank fills its own two places with `suspect` and
    `memory_mb`.
    """
    world, flags_F = group.world, torch.tensor([flags.stopping, flags.saving, flags.failed])
    by_rank_2R = torch.zeros(2, world, dtype=torch.float64)
    by_rank_2R[1, group.rank] = memory_mb
    local = to_device(torch.cat([flags_F, by_rank_2R.view(-1)]), group.device)
    local[len(flags_F) + group.rank] = suspect
    summed = group.sum_(torch.cat([sums_M, local]))
    on_host = torch.cat([summed, norm().double().view(1)]).cpu()
    sums_M, raised_F, suspect_R, memory_R, norm_1 = on_host.split([len(sums_M), len(flags_F), world, world, 1])
    suspects = suspect_R.nonzero()[:, 0].tolist()
    return StepSync(sums_M.tolist(), float(memory_R.max()), suspects, Flags(*(raised_F > 0).tolist()), float(norm_1))
