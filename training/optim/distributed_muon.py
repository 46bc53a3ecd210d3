"""Muon over several processes. Each matrix is orthogonalized by one process only.

Momentum works element by element, so each process keeps the momentum of its rows. Orthogonalization needs the full matrix. The
processes work in turns, with one matrix each. A process collects the rows of its matrix in bfloat16 (the iterations run in
bfloat16 anyway), computes the update with torch.optim.Muon, and sends each process its rows. So does the code of Muon's
author (Jordan 2024).

Legend: M rows and N columns of a matrix, R the rows of this process.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from training.contract.config.optimizer import Muon


class MatrixAssignment(Protocol):
    """How `processes` share whole matrices. In a turn, process i owns the i-th of the given names; `number` is this process.

    With fewer names than processes, the last processes own none. All processes make the same calls.
    """

    number: int
    processes: int

    def size(self, name: str, rows: Tensor) -> int:
        """Return how many numbers the full matrix of these `rows` has."""

    def collect(self, names: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        """Return the full matrix of this process; `rows` are its local rows of each named matrix."""

    def spread(self, names: Sequence[str], whole: Tensor | None, into: Sequence[Tensor]) -> None:
        """Fill `into`, the local rows of each named matrix; `whole` is the full matrix of this process."""


class DistributedMuon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is Any to mypy
    """Muon with `settings`, over `groups` of named matrices or of this process's rows of them."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: Muon, turns: MatrixAssignment) -> None:
        super().__init__(groups, {})
        self._settings, self._assignment = settings, turns

    @torch.no_grad()  # type: ignore[untyped-decorator]  # as above
    def step(self) -> None:
        """Update all matrices; a turn has matrices of similar size. Collective, also for a process without rows."""
        processes = self._assignment.processes
        for group in self.param_groups:
            named_matrices = zip(group["param_names"], group["params"], strict=True)
            matrices = sorted(named_matrices, key=lambda matrix: self._assignment.size(*matrix), reverse=True)
            for first in range(0, len(matrices), processes):
                names, rows = zip(*matrices[first : first + processes], strict=True)
                self._step(names, rows, group["lr"], group["weight_decay"])

    def _step(self, names: Sequence[str], rows: Sequence[Parameter], learning_rate: float, weight_decay: float) -> None:
        directions = [self._direction(rows_RN).bfloat16() for rows_RN in rows]
        direction_MN = self._assignment.collect(names, directions)
        update_MN = None if direction_MN is None else self._update(direction_MN.float(), learning_rate)
        updates = [torch.empty_like(rows_RN) for rows_RN in rows]
        self._assignment.spread(names, update_MN, updates)
        for rows_RN, update_RN in zip(rows, updates, strict=True):
            rows_RN.mul_(1 - learning_rate * weight_decay).add_(update_RN)

    def _direction(self, rows_RN: Parameter) -> Tensor:
        """Return the momentum after this step's gradient, with Nesterov's lookahead if it is set."""
        state, gradient_RN, decay = self.state[rows_RN], rows_RN.grad, self._settings.momentum
        assert gradient_RN is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient_RN)
        momentum_RN: Tensor = state["momentum_buffer"].lerp_(gradient_RN, 1 - decay)
        return gradient_RN.lerp(momentum_RN, decay) if self._settings.nesterov else momentum_RN

    def _update(self, direction_MN: Tensor, learning_rate: float) -> Tensor:
        """Return Muon's update: its step from a zero matrix with this gradient and without momentum."""
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
