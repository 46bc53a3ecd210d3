"""How the ranks share whole matrices, of which each has one at a time (training.optim.distributed_muon).

Ranks that hold shards exchange rows, all to all: each gets all rows of one matrix, and gives back those of its update. Ranks
that hold all weights have every matrix already, and send the update to the others on their machine; each machine computes all
of them, which takes less time than a slow network between machines would.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed import Group, mesh_of


class ReplicatedAssignment:
    """Every rank of this machine holds all rows."""

    def __init__(self, ranks: Group) -> None:
        self.processes = ranks.world // ranks.nodes
        self.number = ranks.rank % self.processes
        self._ranks = ranks

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return mesh_of(self._ranks, {"machine": self._ranks.nodes, "rank": self.processes})["rank"].get_group()

    def size(self, name: str, rows: Tensor) -> int:
        return int(rows.numel())

    def collect(self, names: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        return rows[self.number] if self.number < len(names) else None

    def spread(self, names: Sequence[str], whole: Tensor | None, into: Sequence[Tensor]) -> None:
        if whole is not None:
            into[self.number].copy_(whole)
        for owner, tensor in enumerate(into):
            dist.broadcast(tensor, group=self._group, group_src=owner)


class ShardedAssignment:
    """Every rank of `group` holds some rows; `row_counts` tells how many rows of a tensor each of them holds."""

    def __init__(self, group: dist.ProcessGroup, row_counts: Callable[[str], Sequence[int]]) -> None:
        self.processes, self.number = group.size(), group.rank()
        self._group, self._row_counts = group, row_counts

    def size(self, name: str, rows: Tensor) -> int:
        return sum(self._row_counts(name)) * int(rows.shape[1])

    def collect(self, names: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        whole = self._exchange(torch.cat([r.view(-1) for r in rows]), self._held(rows), self._own(names, rows))
        return whole.view(-1, rows[self.number].shape[1]) if self.number < len(names) else None

    def spread(self, names: Sequence[str], whole: Tensor | None, into: Sequence[Tensor]) -> None:
        given, held = into[0].new_empty(0) if whole is None else whole.view(-1), self._held(into)
        taken = self._exchange(given, self._own(names, into), held).split(held)
        for tensor, numbers in zip(into, taken, strict=False):
            tensor.copy_(numbers.view_as(tensor))

    def _held(self, rows: Sequence[Tensor]) -> list[int]:
        """How many numbers this rank holds of the matrix of each rank."""
        return [tensor.numel() for tensor in rows] + [0] * (self.processes - len(rows))

    def _own(self, names: Sequence[str], rows: Sequence[Tensor]) -> list[int]:
        """How many numbers of this rank's matrix each rank holds."""
        if self.number >= len(names):
            return [0] * self.processes
        return [count * rows[self.number].shape[1] for count in self._row_counts(names[self.number])]

    def _exchange(self, given: Tensor, sizes: list[int], sizes_taken: list[int]) -> Tensor:
        taken = given.new_empty(sum(sizes_taken))
        dist.all_to_all_single(taken, given, sizes_taken, sizes, self._group)
        return taken
