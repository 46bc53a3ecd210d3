"""Muon where each process holds some rows of each matrix.

Momentum works element by element, so each process keeps that of its own rows. But what is made orthogonal is a whole matrix:
the rows of all are gathered, in bfloat16, in which the iterations run anyway; then every process computes the whole update,
as it would with whole weights, and takes its rows of it. So weights move as by torch.optim.Muon, which computes the update.

Legend: M rows and N columns of a matrix, R the rows of this process.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from training.contract.optimizer import Muon
from training.pieces import LocalRows


class Shards(Protocol):
    """Tensors, by name, of which each process of a group holds some rows."""

    def local_rows(self, name: str) -> LocalRows:
        """Which rows this process holds."""

    def whole(self, name: str, rows: Tensor) -> Tensor:
        """The rows of all processes, each of which gives its own; all of them call this."""


class ShardedMuon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is Any to mypy
    """Muon as `settings` say, over `groups` of named rows of matrices; `shards` knows the whole ones."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: Muon, shards: Shards) -> None:
        super().__init__(groups, {})
        self._settings, self._shards = settings, shards

    def step(self) -> None:
        """Every process steps all matrices, in the same order, also those of which it holds no row."""
        for group in self.param_groups:
            for name, rows_RN in zip(group["param_names"], group["params"], strict=True):
                with torch.no_grad():
                    whole_MN = self._shards.whole(name, self._direction(rows_RN).bfloat16())
                    first = self._shards.local_rows(name).first
                    update_RN = self._update(whole_MN.float(), group["lr"])[first : first + len(rows_RN)]
                    rows_RN.mul_(1 - group["lr"] * group["weight_decay"]).add_(update_RN)

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
