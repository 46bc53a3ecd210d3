"""One optimizer step, the same for every objective: accumulate, agree, reduce, clip, step.

Legend: I items of a batch, M quantities that the objective tells of each item; the first of them is the loss.

1. Each rank runs its micro-batches forward and backward on (sum of its items' losses) / (count of the global batch), so
   gradients add up to the gradient of the global mean however the batch is cut and spread.
2. One small all-reduce: the sums of the M quantities, and of each rank whether it met a value that is not finite, and
   how much memory it has used. So every rank knows what the others know, and all stop together, before the step.
3. One large all-reduce of the gradient; its norm is the same number on every rank.
4. Clip, set the learning rate, step.

A rank without an item skips 1 and takes part in the rest.
"""

import resource
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.errors import TrainingError
from training.contract.recipe import SupervisedTuning, Training
from training.data.packing import Batches, Positions, seed_sequence
from training.distributed import Group
from training.masters import Masters
from training.optim import build_optimizer, hidden_matrices, schedule_factor, set_learning_rate

_SHOWN = 8


class Objective(Protocol):
    """What a run minimizes: the sum of the first quantity over a batch's items, divided by the batch's `count`."""

    names: tuple[str, ...]

    def count(self, items: Positions) -> int:
        """What the sums over these items are divided by."""

    def rows(self, items: Positions) -> Positions:
        """The data rows of the items, for people."""

    def values_IM(self, model: PreTrainedModel, items: Positions) -> Tensor:
        """The quantities of each item, float64; the first column is differentiable."""


class Stepper:
    """The optimizer steps of one run; `steps` is how many there are in all, for the learning rate."""

    def __init__(
        self,
        masters: Masters,
        objective: Objective,
        batches: Batches,
        settings: Training | SupervisedTuning,
        steps: int,
        group: Group,
    ) -> None:
        self.masters, self.objective, self.batches, self.steps = masters, objective, batches, steps
        self.optimizer = build_optimizer(settings.optimizer, masters.parameters, hidden_matrices(masters.model))
        self._settings, self._group = settings, group

    def step(self, step: int) -> dict[str, float]:
        """Take `step`, counted from 1, and tell its metrics, the same on every rank.

        Raises TrainingError on every rank if a loss or the gradient is not finite; the weights are then untouched.
        """
        started = time.perf_counter()
        means, memory = self._accumulate(step)
        norm = self._reduce_gradient(step)
        factor = schedule_factor(self._settings.schedule, step, self.steps)
        self._apply(norm, factor)
        seconds = time.perf_counter() - started
        return means | {
            "grad_norm": float(norm),
            "learning_rate": self._settings.optimizer.learning_rate * factor,
            "tokens_per_second": self.batches.tokens(step) / seconds,
            "peak_memory_mb": memory,
        }

    def _accumulate(self, step: int) -> tuple[dict[str, float], float]:
        """Forward and backward over this rank's part; the means over the global batch, and the highest memory use."""
        parts = self.batches.micro_batches(step, self._group.rank, self._group.world)
        count = self.objective.count(self.batches.batch(step))
        self._start(step)
        tables = [torch.zeros(0, len(self.objective.names), dtype=torch.float64, device=self._group.device)]
        for items in parts:
            values_IM = self.objective.values_IM(self.masters.model, items)
            (values_IM[:, 0].sum() / count).backward()
            tables.append(values_IM.detach())
        items = np.concatenate([np.zeros(0, np.int64), *parts])
        sums, memory = self._agree(step, items, torch.cat(tables))
        return {name: value / count for name, value in zip(self.objective.names, sums, strict=True)}, memory

    def _start(self, step: int) -> None:
        self.masters.gradient_N.zero_()
        self.masters.model.train(self.masters.has_dropout)
        dropout = seed_sequence(self._settings.seed, step, self._group.rank)
        torch.manual_seed(int(dropout.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def _agree(self, step: int, items: Positions, values_IM: Tensor) -> tuple[list[float], float]:
        """The sums over all ranks. Raises TrainingError on every rank if one of them met what is not finite."""
        world, rank = self._group.world, self._group.rank
        suspects = self._suspects(items, values_IM)
        shared = torch.zeros(2, world, dtype=torch.float64, device=self._group.device)
        shared[0, rank] = len(suspects)
        shared[1, rank] = peak_memory_mb(self._group.device)
        message = self._group.sum_(torch.cat([values_IM.sum(0), shared.view(-1)]))
        sums, (counts, memories) = message[: -2 * world].tolist(), message[-2 * world :].view(2, world).tolist()
        if any(counts):
            self._refuse(step, suspects, [int(count) for count in counts])
        return sums, max(memories)

    def _suspects(self, items: Positions, values_IM: Tensor) -> Positions:
        """This rank's items with a value that is not finite; all its items if only the gradient is not finite."""
        bad: npt.NDArray[np.bool_] = ~values_IM.isfinite().all(dim=1).cpu().numpy()
        if bad.any():
            return items[bad]
        return items[:0] if bool(self.masters.gradient_norm().isfinite()) else items

    def _refuse(self, step: int, suspects: Positions, counts: list[int]) -> None:
        own = torch.from_numpy(self.objective.rows(suspects)).to(self._group.device)
        parts = self._group.gather_rows(own).cpu().split(counts)
        places = "; ".join(f"rank {rank}, {_shown(part.tolist())}" for rank, part in enumerate(parts) if len(part))
        raise TrainingError(
            f"step {step}: the loss or its gradient is not finite ({places}); no weight was changed by this step. "
            f"Look at these rows, or lower `optimizer.learning_rate` or `max_grad_norm`"
        )

    def _reduce_gradient(self, step: int) -> Tensor:
        self._group.sum_(self.masters.gradient_N)
        norm = self.masters.gradient_norm()
        if not norm.isfinite():
            raise TrainingError(
                f"step {step}: the norm of the gradient is {float(norm)} on all {self._group.world} ranks together, "
                f"while each rank's own is finite; lower `optimizer.learning_rate` or `max_grad_norm`"
            )
        return norm

    def _apply(self, norm: Tensor, factor: float) -> None:
        self.masters.clip_(norm, self._settings.max_grad_norm)
        set_learning_rate(self.optimizer, factor)
        self.optimizer.step()
        self.masters.publish()


def peak_memory_mb(device: torch.device) -> float:
    """The most this process has held: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _shown(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"rows {', '.join(map(str, rows[:_SHOWN]))}{more}"
