"""One optimizer step, the same for every objective: accumulate, agree, reduce, clip, step.

Legend: I items of a batch, M quantities that the objective tells of each item; the first of them is the loss.

0. The objective is told the batch, and of a loss that couples pairs it asks the policy first, without gradients.
1. Each rank runs its micro-batches forward and backward on (sum of its items' losses) / (count of the global batch), so
   gradients add up to the gradient of the global mean however the batch is cut and spread.
2. The gradient is summed over the ranks, most of it while the last backward pass still runs (training.parallel).
3. One small all-reduce: the sums of the M quantities, and of each rank whether it met a value that is not finite before
   gradients were summed. So every rank knows what the others know, and all stop together, before the step.
4. Clip, set the learning rate, step.

On a GPU the processor waits in 3 and nowhere else: what goes there is laid out ahead, and nothing asks it for a number or
for a size.

A rank without an item skips 1, unless the weights are spread over the ranks, and takes part in the rest.
"""

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.agreement import Agreed, Flags, agree
from training.contract.errors import TrainingError
from training.contract.recipe import SupervisedTuning, Training
from training.data.ahead import ahead
from training.data.packing import Batches, MicroBatch, Positions, seed_sequence
from training.distributed import Group
from training.optim import build_optimizer, hidden_matrices, schedule_factor, set_learning_rate
from training.parallel.masters import Masters

_SHOWN = 8
Ready = TypeVar("Ready")


class Objective(Protocol[Ready]):
    """What a run minimizes: the sum of the first quantity over a batch's items, divided by the batch's `count`."""

    names: tuple[str, ...]

    def count(self, items: Positions) -> int:
        """What the sums over these items are divided by."""

    def rows(self, items: Positions) -> Positions:
        """The data rows of the items, for people."""

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        """Before the micro-batches `parts` of this rank are run, on every rank; the model may be run, and is seeded again."""

    def collate(self, model: PreTrainedModel, items: Positions) -> Ready:
        """Make items of the batch ready for a pass of `model`; called in a thread, ahead of the pass."""

    def values_IM(self, model: PreTrainedModel, ready: Ready) -> Tensor:
        """The quantities of each item, float64; the first column is differentiable."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold of it, as plain JSON; empty if nothing."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` told."""


@dataclass(frozen=True)
class Step:
    """A step that was taken: its metrics, and what the ranks told each other, the same on every rank."""

    metrics: dict[str, float]
    flags: Flags


class Stepper:
    """The optimizer steps of one run; `steps` is how many there are in all, for the learning rate."""

    def __init__(
        self,
        masters: Masters,
        objective: Objective[Any],
        batches: Batches,
        settings: Training | SupervisedTuning,
        steps: int,
        group: Group,
    ) -> None:
        self.masters, self.objective, self.batches, self.steps = masters, objective, batches, steps
        self.optimizer = build_optimizer(settings.optimizer, masters.parameters, hidden_matrices(masters.model))
        self._settings, self._group = settings, group

    def step(self, step: int, flags: Flags) -> Step:
        """Take `step`, counted from 1; `flags` are what this rank has to tell the others.

        Raises TrainingError on every rank if a loss or the gradient is not finite; the weights are then untouched.
        """
        started = time.perf_counter()
        count = self.objective.count(self.batches.batch(step))
        agreed = self._accumulate(step, count, flags)
        factor = schedule_factor(self._settings.schedule, step, self.steps)
        self._apply(agreed.norm, factor)
        seconds = time.perf_counter() - started
        means = {name: value / count for name, value in zip(self.objective.names, agreed.sums, strict=True)}
        metrics = {
            "grad_norm": agreed.norm,
            "learning_rate": self._settings.optimizer.learning_rate * factor,
            "tokens_per_second": self.batches.tokens(step) / seconds,
            "peak_memory_mb": agreed.memory_mb,
        }
        return Step(means | metrics, agreed.flags)

    def _accumulate(self, step: int, count: int, flags: Flags) -> Agreed:
        """Forward and backward over this rank's part, and the sums over all ranks' parts."""
        self._start(step)
        parts = self.batches.micro_batches(step, self._group.rank, self._group.world, self.masters.in_lockstep)
        self.objective.prepare(self.masters.model, self.batches.batch(step), parts)
        self._seed(step)  # so that both passes meet the same dropout
        items, values_IM = self._run(parts, count)
        finite_I = values_IM.isfinite().all(dim=1)
        finite = self.masters.reduce()
        memory, suspect = peak_memory_mb(self._group.device), ~(finite & finite_I.all())
        agreed = agree(self._group, values_IM.sum(0), memory, suspect, flags, self.masters.norm)
        if agreed.suspects:
            self._refuse(step, items, finite_I, agreed.suspects)
        if not math.isfinite(agreed.norm):
            raise TrainingError(
                f"step {step}: the norm of the gradient is {agreed.norm} on all {self._group.world} ranks together, "
                f"while each rank's own is finite; lower `optimizer.learning_rate` or `max_grad_norm`"
            )
        return agreed

    def _start(self, step: int) -> None:
        self.masters.zero()
        self.masters.model.train(self.masters.has_dropout)
        self._seed(step)

    def _seed(self, step: int) -> None:
        dropout = seed_sequence(self._settings.seed, step, self._group.rank)
        torch.manual_seed(int(dropout.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def _run(self, parts: Sequence[MicroBatch], count: int) -> tuple[Positions, Tensor]:
        """The items of this rank's micro-batches and their quantities, after their gradients were added up."""
        masters = self.masters
        items = [np.zeros(0, np.int64)]
        tables = [torch.zeros(0, len(self.objective.names), dtype=torch.float64, device=self._group.device)]
        rows = ahead(lambda part: self.objective.collate(masters.model, part.items), parts)
        for number, (part, ready) in enumerate(rows, 1):
            values_IM = self.objective.values_IM(masters.model, ready)
            loss = values_IM[:, 0].sum() / count
            masters.backward(loss if part.counts else loss * 0, last=number == len(parts))
            if part.counts:
                items.append(part.items)
                tables.append(values_IM.detach())
            del values_IM, loss  # with their graph, whose kept logits would stand beside those of the next micro-batch
        return np.concatenate(items), torch.cat(tables)

    def _refuse(self, step: int, items: Positions, finite_I: Tensor, suspects: list[int]) -> None:
        """Name the items with a value that is not finite; all of a rank's items where only its gradient is not."""
        bad_I = ~finite_I.cpu().numpy()
        own = items[bad_I] if bad_I.any() else items
        rows = self.objective.rows(own if self._group.rank in suspects else items[:0])
        ranks = np.full_like(rows, self._group.rank)
        told = self._group.gather_rows(torch.from_numpy(np.stack([ranks, rows], axis=1)).to(self._group.device)).cpu()
        of_rank = {rank: told[told[:, 0] == rank, 1].tolist() for rank in suspects}
        places = "; ".join(f"rank {rank}, {_shown(rows)}" for rank, rows in of_rank.items() if rows)
        raise TrainingError(
            f"step {step}: the loss or its gradient is not finite ({places}); no weight was changed by this step. "
            f"Look at these rows, or lower `optimizer.learning_rate` or `max_grad_norm`"
        )

    def _apply(self, norm: float, factor: float) -> None:
        self.masters.clip_(norm, self._settings.max_grad_norm)
        set_learning_rate(self.optimizer, factor)
        self.optimizer.step()
        self.masters.update_model()


def peak_memory_mb(device: torch.device) -> float:
    """The most this process has held: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _shown(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"rows {', '.join(map(str, rows[:_SHOWN]))}{more}"
