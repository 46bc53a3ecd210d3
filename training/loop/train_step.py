"""One optimizer step, the same for every objective. `TrainStep.step` is the algorithm, top to bottom.

Legend: I items of a batch, M values per item; the first is the loss.

1. Run this rank's micro-batches forward and backward. The loss is the sum of the items' losses, divided by the count of the
   *global* batch. So the gradients add up to the gradient of the global mean for any division into micro-batches and ranks.
2. Sum the gradient over the ranks, most of it during the last backward pass (training.parallel).
3. Sum the M values over the ranks with one small all-reduce. It also names the ranks with non-finite values before gradients
   were summed. All ranks then stop together, before the optimizer step (training.loop.rank_sync).
4. Clip, set the learning rate, step.

On a GPU the CPU waits for the device only in 3. Micro-batches are collated ahead, and our code reads no number or size from the
device before it. (Some transformers models do in their forward pass: see docs/benchmarks.md.)

A rank without items skips 1 and takes part in the rest. If weights are sharded, every pass is collective, so such a rank runs a
padding micro-batch instead. If sequences of such a model cannot share a row, the ranks exchange their numbers of sequences,
and that reads from the device.
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

from training.contract.config.training import SupervisedTuning, Training
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
    """The metrics of a step, and the flags that any rank raised; the same on every rank."""

    metrics: dict[str, float]
    flags: Flags


class TrainStep:
    """The optimizer steps of one run. `steps` is their total number, for the learning rate schedule."""

    def __init__(
        self,
        params: TrainableParams,
        objective: Objective[Any],
        batches: BatchSampler,
        settings: Training | SupervisedTuning,
        steps: int,
    ) -> None:
        self.params, self.objective, self.batches, self.steps = params, objective, batches, steps
        matrices, norms = hidden_matrices(params.model), norm_weights(params.model)
        self.optimizer = build_optimizer(settings.optimizer, params.parameters, matrices, norms, params.turns)
        self.group, self._settings = params.group, settings
        self._sharing = why_not_shared(params.model, params.own_dropout) is None

    def step(self, step: int, flags: Flags) -> StepResult:
        """Take `step`, counted from 1, and exchange this rank's `flags`.

        Raises TrainingError on every rank if a loss or the gradient is not finite. The weights are then unchanged.
        """
        started = time.perf_counter()
        params, objective, group, settings = self.params, self.objective, self.group, self._settings
        batch = self.batches.batch(step)
        lockstep = is_collective(params.model)
        parts = self.batches.micro_batches(step, group.rank, group.world, lockstep, self._sharing)
        count = objective.count(batch)

        params.zero()
        params.train()
        self._seed_dropout(step)
        objective.prepare(params.model, batch, parts)
        self._seed_dropout(step)  # again, so that a pass in `prepare` and the one below draw the same dropout
        items, values_IM = self._forward_backward(parts, count)

        finite_I = values_IM.isfinite().all(dim=1)
        suspect = ~(params.reduce() & finite_I.all())
        sync = sync_step(group, values_IM.sum(0), peak_memory_mb(group.device), suspect, flags, params.norm)
        self._check_finite(step, sync, items, finite_I)

        factor = schedule_factor(settings.schedule, step, self.steps)
        self._apply(sync.norm, factor)
        metrics = {name: value / count for name, value in zip(objective.names, sync.sums, strict=True)} | {
            "grad_norm": sync.norm,
            "learning_rate": settings.optimizer.learning_rate * factor,
            "tokens_per_second": self.batches.tokens(step) / (time.perf_counter() - started),
            "peak_memory_mb": sync.memory_mb,
        }
        return StepResult(metrics, sync.flags)

    def _seed_dropout(self, step: int) -> None:
        """Seed dropout from the recipe's seed, the step and the rank."""
        seeds = seed_sequence(self._settings.seed, step, self.group.rank)
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def _forward_backward(self, parts: Sequence[MicroBatch], count: int) -> tuple[Positions, Tensor]:
        """Accumulate the gradients of this rank's micro-batches. Return its items and their values."""
        params, objective = self.params, self.objective
        items = [np.zeros(0, np.int64)]
        tables = [torch.zeros(0, len(objective.names), dtype=torch.float64, device=self.group.device)]
        collated_parts = prefetch(lambda part: objective.collate(params.model, part.items), parts)
        for number, (part, collated) in enumerate(collated_parts, 1):
            values_IM = objective.values_IM(params.model, collated)
            loss = values_IM[:, 0].sum() / count
            params.backward(loss if part.counts else loss * 0, last=number == len(parts))
            if part.counts:
                items.append(part.items)
                tables.append(values_IM.detach())
            del values_IM, loss  # free their graph and its logits before the next micro-batch
        return np.concatenate(items), torch.cat(tables)

    def _apply(self, norm: float, factor: float) -> None:
        self.params.clip_(norm, self._settings.max_grad_norm)
        set_learning_rate(self.optimizer, factor)
        self.optimizer.step()
        self.params.update_model()

    def _check_finite(self, step: int, sync: StepSync, items: Positions, finite_I: Tensor) -> None:
        """Raise TrainingError on every rank unless all values and the gradient are finite."""
        if sync.suspects:
            raise TrainingError(
                f"step {step}: the loss or its gradient is not finite ({self._describe_suspects(sync, items, finite_I)}); the "
                "step changed no weight. Check these rows, or lower `optimizer.learning_rate` or `max_grad_norm`",
                "non-finite-loss",
            )
        if not math.isfinite(sync.norm):
            raise TrainingError(
                f"step {step}: the gradient norm over all {self.group.world} ranks is {sync.norm}, but the gradient of each "
                "rank is finite; lower `optimizer.learning_rate` or `max_grad_norm`",
                "non-finite-gradient-norm",
            )

    def _describe_suspects(self, sync: StepSync, items: Positions, finite_I: Tensor) -> str:
        """Name the rows with non-finite values, by rank. If only gradients are non-finite, name all rows of the suspects.

        If some ranks have non-finite values, omit the other suspects. A rank that ran a padding micro-batch of those rows gets
        a NaN gradient too (NaN * 0 = NaN).
        """
        rows = self.objective.pairs.rows[items]
        columns = [np.full_like(rows, self.group.rank), rows, ~finite_I.cpu().numpy()]
        all_ranks = self.group.gather_rows(torch.from_numpy(np.stack(columns, axis=1)).to(self.group.device)).cpu()
        bad = all_ranks[:, 2] > 0
        reported = all_ranks[bad] if bad.any() else all_ranks
        rows_by_rank = {rank: reported[reported[:, 0] == rank, 1].tolist() for rank in sync.suspects}
        return "; ".join(f"rank {rank}, {_format_rows(rows)}" for rank, rows in rows_by_rank.items() if rows)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: GPU memory on a GPU, else resident memory."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _format_rows(rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"rows {', '.join(map(str, rows[:_SHOWN]))}{more}"
