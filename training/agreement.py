"""What the ranks tell each other in the middle of each step, in one small all-reduce.

    sums       of the quantities that the objective tells of its items
    memory     the most that any rank has used
    suspects   which ranks met a value that is not finite: then all stop together, before the step
    flags      whether any rank was asked to stop, still saves a checkpoint, or failed to save one

So every rank knows what the others know, and decides the same. On a GPU the numbers are fetched once, together with
the norm of the gradient: of what is done here and in the stepper, it is where the processor waits for the device.

Legend: M quantities, F flags, R ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training.distributed import Group


@dataclass(frozen=True)
class Flags:
    """What one rank has to say beside its numbers, or, once agreed, what any rank has."""

    stopping: bool = False
    saving: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Agreed:
    """The same on every rank. `suspects`: the ranks that met a value that is not finite."""

    sums: list[float]
    memory_mb: float
    suspects: list[int]
    flags: Flags
    norm: float


def agree(
    group: Group, sums_M: Tensor, memory_mb: float, suspect: Tensor, flags: Flags, norm: Callable[[], Tensor]
) -> Agreed:
    """Tell the others this rank's part, all but `norm` being its own; `suspect` is a tensor of one truth value."""
    world, device = group.world, group.device
    said_F = torch.tensor([flags.stopping, flags.saving, flags.failed], dtype=torch.float64, device=device)
    by_rank_2R = torch.zeros(2, world, dtype=torch.float64, device=device)
    by_rank_2R[0, group.rank] = suspect
    by_rank_2R[1, group.rank] = memory_mb
    message = group.sum_(torch.cat([sums_M, said_F, by_rank_2R.view(-1)]))
    told = torch.cat([message, norm().double().view(1)]).cpu()
    all_M, said_F, suspect_R, memory_R, whole = told.split([len(sums_M), len(said_F), world, world, 1])
    suspects = suspect_R.nonzero()[:, 0].tolist()
    return Agreed(all_M.tolist(), float(memory_R.max()), suspects, Flags(*(said_F > 0).tolist()), float(whole))
