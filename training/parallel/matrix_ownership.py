"""How ranks share the work on whole matrices, one matrix per rank at a time (training.optim.distributed_muon).

Ranks with shards exchange rows, all to all: each gets all rows of one matrix and returns the rows of its update. Ranks with
all weights have all matrices, and broadcast the update to the other ranks of their node. Each node computes all updates:
this takes less time than a slow network between nodes.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed import Group, mesh_of


class ReplicatedAssignment:
    """An assignment for ranks that hold all rows; the ranks of one node share the work."""

    def __init__(self, ranks: Group) -> None:
        self.processes = ranks.world // ranks.nodes
        self.number = ranks.rank % self.processes
        self._ranks = ranks

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        return mesh_of(self._ranks, {"node": self._ranks.nodes, "rank": self.processes})["rank"].get_group()

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
    """An assignment for ranks that hold some rows each. `row_counts(name)` returns the rows of a tensor on each rank."""

    def __init__(self, group: dist.ProcessGroup, row_counts: Callable[[str], Sequence[int]]) -> None:
        self.processes, self.number = group.size(), group.rank()
        self._group, self._row_counts = group, row_counts

    def size(self, name: str, rows: Tensor) -> int:
        return sum(self._row_counts(name)) * int(rows.shape[1])

    def collect(self, names: Sequence[str], rows: Sequence[Tensor]) -> Tensor | None:
        local = torch.cat([tensor.view(-1) for tensor in rows])
        matrix = self._exchange(local, self._sizes_held(rows), self._sizes_owned(names, rows))
        return matrix.view(-1, rows[self.number].shape[1]) if self.number < len(names) else None

    def spread(self, names: Sequence[str], whole: Tensor | None, into: Sequence[Tensor]) -> None:
        matrix, sizes_held = into[0].new_empty(0) if whole is None else whole.view(-1), self._sizes_held(into)
        received = self._exchange(matrix, self._sizes_owned(names, into), sizes_held).split(sizes_held)
        for tensor, numbers in zip(into, received, strict=False):
            tensor.copy_(numbers.view_as(tensor))

    def _sizes_held(self, rows: Sequence[Tensor]) -> list[int]:
        """Return how many numbers of each rank's matrix this rank holds."""
        return [tensor.numel() for tensor in rows] + [0] * (self.processes - len(rows))

    def _sizes_owned(self, names: Sequence[str], rows: Sequence[Tensor]) -> list[int]:
        """Return how many numbers of this rank's matrix each rank holds."""
        if self.number >= len(names):
            return [0] * self.processes
        return [count * rows[self.number].shape[1] for count in self._row_counts(names[self.number])]

    def _exchange(self, numbers: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        received = numbers.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, numbers, received_sizes, sent_sizes, self._group)
        return received
