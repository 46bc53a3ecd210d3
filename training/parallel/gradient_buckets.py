"""Summing a long gradient over the ranks while the rest of it is still being computed.

The gradients lie in one tensor, in the order of the parameters. A backward pass completes them roughly from the end, so the
tensor is cut from its end into buckets of some 25 MB. In the last backward pass of a step a bucket is sent as soon as it
is complete and the buckets behind it were sent: so every rank sends in the same order, whichever it completes first. A
rank that has nothing to run sends all its buckets at the end. The exchange overlaps with the pass, as in torch's
DistributedDataParallel (Li et al. 2020).

A sum does not tell which rank spoiled it, so each rank first notes whether its own bucket is finite.

Legend: N numbers of the whole gradient.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.distributed import Group

BUCKET_BYTES = 25 << 20


class GradientBuckets:
    """The buckets of `gradient_N`, which holds parameters of `sizes` numbers each, in their order."""

    def __init__(
        self, gradient_N: Tensor, sizes: Sequence[int], group: Group, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._group = group
        self._owners = _cut([size * gradient_N.itemsize for size in sizes], bucket_bytes)
        lengths = [0] * (max(self._owners) + 1)
        for owner, size in zip(self._owners, sizes, strict=True):
            lengths[owner] += size
        self._buckets = gradient_N.split(lengths[::-1])[::-1]
        self.begin()

    def begin(self) -> None:
        """Start a step: nothing is complete, and nothing is sent before `expect`."""
        self._missing = Counter(self._owners)
        self._expecting, self._sent = False, 0
        self._waits: list[Callable[[], object]] = []
        self._totals: list[Tensor] = []

    def expect(self) -> None:
        """The last backward pass begins: buckets that it completes may be sent."""
        self._expecting = True

    def complete(self, parameter: int) -> None:
        """The present pass has added its part to the gradient of this parameter."""
        if not self._expecting:
            return
        self._missing[self._owners[parameter]] -= 1
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send()

    def finish(self) -> Tensor:
        """Send the rest and wait for all; returns whether everything that this rank sent was finite."""
        while self._sent < len(self._buckets):
            self._send()
        for wait in self._waits:
            wait()
        return torch.stack(self._totals).isfinite().all()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        self._totals.append(bucket.sum())  # a sum with inf or NaN in it is not finite
        self._waits.append(self._group.start_sum_(bucket))
        self._sent += 1


def _cut(sizes: Sequence[int], limit: int) -> list[int]:
    """The bucket of each parameter: consecutive ones, from the last, until a bucket would grow over `limit` bytes."""
    owners, bucket, filled = [], 0, 0
    for size in reversed(sizes):
        if filled and filled + size > limit:
            bucket, filled = bucket + 1, 0
        owners.append(bucket)
        filled += size
    return owners[::-1]
