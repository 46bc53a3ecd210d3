"""Muon over several processes, none of which makes a matrix orthogonal that another one does.

Momentum works element by element, so each process keeps that of the rows that it holds. But what is made orthogonal is a whole
matrix. The processes take the matrices in turns, one each: a process collects the rows of its own, in bfloat16, in which the
iterations run anyway, computes the update, and gives every process the rows that it holds. The code of Muon's author does so
too (Jordan 2024). Weights move as by torch.optim.Muon, which computes the update.

Legend: M rows and N columns of a matrix, R the rows of this process.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from training.contract.config.optimizer import Muon


class MatrixAssignment(Protocol):
    """How `processes`, of which this one is `number`, share whole matrices. In a turn, process i has the i-th of some names.

    The names may be fewer than the processes; then the last ones have none. All processes make the same calls.
    """

    number: int
    processes: int

    def size(self, name: str, rows: Tensor) -> int:
        """How many numbers the whole matrix has of which this process holds `rows`."""

    def collect(self, names: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        """The matrix of this process, whole; `rows` are those that it holds of each."""

    def spread(self, names: Sequence[str], whole: Tensor | None, into: Sequence[Tensor]) -> None:
        """Fill `into`, the rows of each matrix that this process holds; `whole` is its own."""


class DistributedMuon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is Any to mypy
    """Muon as `settings` say, over `groups` of named matrices, or of the rows of them that this process holds."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: Muon, turns: MatrixAssignment) -> None:
        super().__init__(groups, {})
        self._settings, self._turns = settings, turns

    @torch.no_grad()  # type: ignore[untyped-decorator]  # as above
    def step(self) -> None:
        """Every process calls this, also one that holds no row of some matrix. Matrices of one size come in one turn."""
        each = self._turns.processes
        for group in self.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            matrices = sorted(named, key=lambda matrix: self._turns.size(*matrix), reverse=True)
            for first in range(0, len(matrices), each):
                names, rows = zip(*matrices[first : first + each], strict=True)
                self._step(names, rows, group["lr"], group["weight_decay"])

    def _step(self, names: Sequence[str], rows: Sequence[Parameter], learning_rate: float, weight_decay: float) -> None:
        whole_MN = self._turns.collect(names, [self._direction(rows_RN).bfloat16() for rows_RN in rows])
        update_MN = None if whole_MN is None else self._update(whole_MN.float(), learning_rate)
        updates = [torch.empty_like(rows_RN) for rows_RN in rows]
        self._turns.spread(names, update_MN, updates)
        for rows_RN, update_RN in zip(rows, updates, strict=True):
            rows_RN.mul_(1 - learning_rate * weight_decay).add_(update_RN)

    def _direction(self, rows_RN: Parameter) -> Tensor:
        """The momentum after this step's gradient; with Nesterov's look ahead."""
        state, gradient_RN, keep = self.state[rows_RN], rows_RN.grad, self._settings.momentum
        assert gradient_RN is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient_RN)
        momentum_RN: Tensor = state["momentum_buffer"].lerp_(gradient_RN, 1 - keep)
        return gradient_RN.lerp(momentum_RN, keep) if self._settings.nesterov else momentum_RN

    def _update(self, direction_MN: Tensor, learning_rate: float) -> Tensor:
        """What Muon adds to a matrix: the step of one that is zero, has this gradient and no momentum."""
        matrix_MN, settings = Parameter(torch.zeros_like(direction_MN)), self._settings
        matrix_MN.grad = direction_MN
        torch.optim.Muon(
            [matrix_MN],
            learning_rate,
            weight_decay=0.0,
            momentum=0.0,
            ns_steps=settings.ns_steps,
            adjust_lr_fn=settings.adjust_lr,
        ).step()
        return matrix_MN
