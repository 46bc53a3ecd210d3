"""What the ranks exchange in the middle of each step, in one small all-reduce.

    sums       of the values that the objective reports of its items
    memory     the most that any rank has used
    suspects   which ranks met a value that is not finite: then all stop together, before the step
    flags      whether any rank was asked to stop, still saves a checkpoint, or failed to save one

So all ranks know the same and decide the same. On a GPU the numbers are fetched once, together with the norm of the gradient:
here alone a step waits for the device (train_step.py).

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
    """Of one rank; or, after the exchange, whether any rank raised them."""

    stopping: bool = False
    saving: bool = False
    failed: bool = False


@dataclass(frozen=True)
class StepSync:
    """The same on every rank. `suspects`: the ranks that met a value that is not finite."""

    sums: list[float]
    memory_mb: float
    suspects: list[int]
    flags: Flags
    norm: float


def sync_step(
    group: Group, sums_M: Tensor, memory_mb: float, suspect: Tensor, flags: Flags, norm: Callable[[], Tensor]
) -> StepSync:
    """Exchange what each rank gives; `suspect` is a boolean tensor, `norm` gives the norm of the whole gradient.

    One vector is summed: M sums, F flags, and R + R places of which each rank fills its own with `suspect` and `memory_mb`.
    """
    world, flags_F = group.world, torch.tensor([flags.stopping, flags.saving, flags.failed])
    by_rank_2R = torch.zeros(2, world, dtype=torch.float64)
    by_rank_2R[1, group.rank] = memory_mb
    own = to_device(torch.cat([flags_F, by_rank_2R.view(-1)]), group.device)
    own[len(flags_F) + group.rank] = suspect
    summed = group.sum_(torch.cat([sums_M, own]))
    fetched = torch.cat([summed, norm().double().view(1)]).cpu()
    sums_M, raised_F, suspect_R, memory_R, norm_1 = fetched.split([len(sums_M), len(flags_F), world, world, 1])
    suspects = suspect_R.nonzero()[:, 0].tolist()
    return StepSync(sums_M.tolist(), float(memory_R.max()), suspects, Flags(*(raised_F > 0).tolist()), float(norm_1))
