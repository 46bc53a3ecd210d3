"""One optimizer step, the same for every objective. `TrainStep.step` is the algorithm, top to bottom.

Legend: I items of a batch, M values that the objective reports of each item; the first of them is the loss.

1. Each rank runs its micro-batches forward and backward. What is differentiated is the sum of the items' losses, divided by
   the count of the *global* batch: so gradients add up to that of the global mean however a batch is cut and spread.
2. The gradient is summed over the ranks, most of it while the last backward pass still runs (training.parallel).
3. One small all-reduce gives every rank the sums of the M values, and tells which ranks met a value that is not finite, seen
   before gradients were summed. All ranks then stop together, before the step (training.loop.rank_sync).
4. Clip, set the learning rate, step.

On a GPU the processor waits for the device in 3 and nowhere else: micro-batches are collated ahead, and nothing of ours before
it reads a number or a size off the device (some models of transformers do in a pass: docs/benchmarks.md names them). A rank
that has no items skips 1 and takes part in the rest; where weights are sharded every pass is collective, so there it runs a
micro-batch that does not count (and of a model whose sequences cannot share a row the ranks tell each other how many they have,
which is read off the device).
"""

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.contract.config.recipe import SupervisedTuning, Training
from training.contract.errors import TrainingError
from training.data.tokenization.batch_sampler import BatchSampler, MicroBatch, Positions, seed_sequence
from training.loop.objective import Objective
from training.loop.rank_sync import Flags, StepSync, sync_step
from training.model.attention.prefix_support import why_not_shared
from training.model.device_prefetch import prefetch
from training.model.logprobs.response_logprobs import is_collective
from training.optim.optimizer import build_optimizer, hidden_matrices, norm_weights, schedule_factor, set_learning_rate
from training.parallel.train_state import TrainableParams

_SHOWN = 8


@dataclass(frozen=True)
class StepResult:
    """A step that was taken: its metrics, and the flags of all ranks, the same on every rank."""

    metrics: dict[str, float]
    flags: Flags


class TrainStep:
    """The optimizer steps of one run; `steps` is how many there are in all, for the learning rate."""

    def __init__(
        self,
        masters: TrainableParams,
        objective: Objective[Any],
        batches: BatchSampler,
        settings: Training | SupervisedTuning,
        steps: int,
    ) -> None:
        self.masters, self.objective, self.batches, self.steps = masters, objective, batches, steps
        matrices, norms = hidden_matrices(masters.model), norm_weights(masters.model)
        self.optimizer = build_optimizer(settings.optimizer, masters.parameters, matrices, norms, masters.turns)
        self.group, self._settings = masters.group, settings
        self._sharing = why_not_shared(masters.model, masters.own_dropout) is None

    def step(self, step: int, flags: Flags) -> StepResult:
        """Take `step`, counted from 1; `flags` are what this rank has to tell the others.

        Raises TrainingError on every rank if a loss or the gradient is not finite; the weights are then untouched.
        """
        started = time.perf_counter()
        masters, objective, group, settings = self.masters, self.objective, self.group, self._settings
        batch = self.batches.batch(step)
        lockstep = is_collective(masters.model)
        parts = self.batches.micro_batches(step, group.rank, group.world, lockstep, self._sharing)
        count = objective.count(batch)

        masters.zero()
        masters.train()
        self._seed_dropout(step)
        objective.prepare(masters.model, batch, parts)
        self._seed_dropout(step)  # again, so that a pass in `prepare` and the one below draw the same dropout
        items, values_IM = self._forward_backward(parts, count)

        finite_I = values_IM.isfinite().all(dim=1)
        suspect = ~(masters.reduce() & finite_I.all())
        agreed = sync_step(group, values_IM.sum(0), peak_memory_mb(group.device), suspect, flags, masters.norm)
        self._check_finite(step, agreed, items, finite_I)

        factor = schedule_factor(settings.schedule, step, self.steps)
        self._apply(agreed.norm, factor)
        metrics = {name: value / count for name, value in zip(objective.names, agreed.sums, strict=True)} | {
            "grad_norm": agreed.norm,
            "learning_rate": settings.optimizer.learning_rate * factor,
            "tokens_per_second": self.batches.tokens(step) / (time.perf_counter() - started),
            "peak_memory_mb": agreed.memory_mb,
        }
        return StepResult(metrics, agreed.flags)

    def _seed_dropout(self, step: int) -> None:
        """Dropout is a function of the recipe's seed, the step and the rank."""
        seeds = seed_sequence(self._settings.seed, step, self.group.rank)
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def _forward_backward(self, parts: Sequence[MicroBatch], count: int) -> tuple[Positions, Tensor]:
        """Add up the gradients of this rank's micro-batches; returns its items and their values."""
        masters, objective = self.masters, self.objective
        items = [np.zeros(0, np.int64)]
        tables = [torch.zeros(0, len(objective.names), dtype=torch.float64, device=self.group.device)]
        collated_parts = prefetch(lambda part: objective.collate(masters.model, part.items), parts)
        for number, (part, collated) in enumerate(collated_parts, 1):
            values_IM = objective.values_IM(masters.model, collated)
            loss = values_IM[:, 0].sum() / count
            masters.backward(loss if part.counts else loss * 0, last=number == len(parts))
            if part.counts:
                items.append(part.items)
                tables.append(values_IM.detach())
            del values_IM, loss  # and their graph, whose kept logits would add to those of the next micro-batch
        return np.concatenate(items), torch.cat(tables)

    def _apply(self, norm: float, factor: float) -> None:
        self.masters.clip_(norm, self._settings.max_grad_norm)
        set_learning_rate(self.optimizer, factor)
        self.optimizer.step()
        self.masters.update_model()

    def _check_finite(self, step: int, agreed: StepSync, items: Positions, finite_I: Tensor) -> None:
        """Raise TrainingError on every rank unless all values and the gradient are finite."""
        if agreed.suspects:
            raise TrainingError(
                f"step {step}: the loss or its gradient is not finite ({self._suspects(agreed, items, finite_I)}); no "
                f"weight was changed by this step. Look at these rows, or lower `optimizer.learning_rate` or `max_grad_norm`"
            )
        if not math.isfinite(agreed.norm):
            raise TrainingError(
                f"step {step}: the norm of the gradient is {agreed.norm} on all {self.group.world} ranks together, "
                f"while each rank's own is finite; lower `optimizer.learning_rate` or `max_grad_norm`"
            )

    def _suspects(self, agreed: StepSync, items: Positions, finite_I: Tensor) -> str:
        """The rows with a value that is not finite, rank by rank; all rows of the suspects where only gradients are not.

        A suspect without such a value is not blamed beside one that has some: it may have run their rows for company, and then
        its gradient is not finite either, since NaN times zero is NaN.
        """
        rows = self.objective.pairs.rows[items]
        columns = [np.full_like(rows, self.group.rank), rows, ~finite_I.cpu().numpy()]
        all_ranks = self.group.gather_rows(torch.from_numpy(np.stack(columns, axis=1)).to(self.group.device)).cpu()
        bad = all_ranks[:, 2] > 0
        named = all_ranks[bad] if bad.any() else all_ranks
        of_rank = {rank: named[named[:, 0] == rank, 1].tolist() for rank in agreed.suspects}
        return "; ".join(f"rank {rank}, {_shown(rows)}" for rank, rows in of_rank.items() if rows)


def peak_memory_mb(device: torch.device) -> float:
    """The most this process has held: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _shown(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"rows {', '.join(map(str, rows[:_SHOWN]))}{more}"
