"""The optimizer and its learning rate.

AdamW decays weight matrices and embeddings only: norms and biases, vectors of scale and offset, are left alone. The
kernel is torch's fused one, which exists for CPUs and for CUDA.

The learning rate of step n (1, 2, ... N) is a pure function of n, so that resuming needs no scheduler state:

    n <= W       n / (W + 1)                              warm-up, W = ceil(warmup_ratio * N) steps
    n > W        1, or falling with p = (n-1-W) / (N-W)   constant; linear 1-p; cosine (1 + cos(pi p)) / 2

so no step is wasted: the first has a learning rate above zero, W+1 is the first with the full one, and the last is
above zero too. After the warm-up it is what transformers' `get_scheduler` gives.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from training.contract.recipe import Optimizer, Schedule

# ratio * steps is a product of floats: 0.07 * 100 is 7.000000000000001 and means 7.
_ROUNDING = 1e-9


def build_optimizer(settings: Optimizer, parameters: Mapping[str, Parameter]) -> torch.optim.Optimizer:
    """AdamW over named parameters, in two groups: with weight decay and without."""
    decayed = {name for name, parameter in parameters.items() if _is_decayed(name, parameter)}
    groups = [
        _group(parameters, (n for n in parameters if n in decayed), settings.weight_decay),
        _group(parameters, (n for n in parameters if n not in decayed), 0.0),
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def schedule_factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the recipe's learning rate is multiplied by at `step`, counted from 1 to `steps`; in (0, 1]."""
    assert 1 <= step <= steps, f"step {step} of {steps}"
    warmup = warmup_steps(schedule, steps)
    if step <= warmup:
        return step / (warmup + 1)
    done = (step - 1 - warmup) / (steps - warmup)
    match schedule.type:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1.0 + math.cos(math.pi * done)) / 2


def warmup_steps(schedule: Schedule, steps: int) -> int:
    return math.ceil(schedule.warmup_ratio * steps - _ROUNDING)


def _group(parameters: Mapping[str, Parameter], names: Iterable[str], weight_decay: float) -> dict[str, Any]:
    return {"params": [(name, parameters[name]) for name in names], "weight_decay": weight_decay}


def _is_decayed(name: str, parameter: Tensor) -> bool:
    # A mixture of experts keeps its biases in matrices, so the name counts as well as the shape.
    return parameter.ndim >= 2 and not name.endswith("bias")
