"""Sum a long gradient over the ranks during the backward pass, in buckets.

The gradients are one tensor, in the order of the parameters. A backward pass completes them roughly from the end, so we cut
the tensor from its end into buckets of about 25 MB. In the last backward pass of a step, a bucket is sent as soon as it is
complete and all buckets after it in the tensor are sent. So all ranks send in the same order. A rank without work sends its
buckets at the end. The exchange overlaps with the pass, as in torch's DistributedDataParallel (Li et al. 2020).

A sum does not show which rank contributed a non-finite value, so each rank first checks its own bucket.

Legend: N numbers of the full gradient.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.distributed import Group

BUCKET_BYTES = 25 << 20


class GradientBuckets:
    """The buckets of `gradient_N`. `sizes`: the numbers per parameter, in order."""

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
        """Start a step: no gradient is complete, and no bucket is sent before `expect`."""
        self._missing = Counter(self._owners)
        self._expecting, self._sent = False, 0
        self._waits: list[Callable[[], object]] = []
        self._totals: list[Tensor] = []

    def expect(self) -> None:
        """Begin the last backward pass: from now on, send complete buckets."""
        self._expecting = True

    def complete(self, parameter: int) -> None:
        """Mark the gradient of this parameter as complete. Do nothing before `expect`."""
        if not self._expecting:
            return
        self._missing[self._owners[parameter]] -= 1
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send()

    def finish(self) -> Tensor:
        """Send the rest, wait for all sums, and return whether all values of this rank were finite."""
        while self._sent < len(self._buckets):
            self._send()
        for wait in self._waits:
            wait()
        return torch.stack(self._totals).isfinite().all()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        self._totals.append(bucket.sum())  # not finite if a value is inf or NaN
        self._waits.append(self._group.start_sum_(bucket))
        self._sent += 1


def _cut(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the bucket of each parameter. Fill buckets from the last parameter on, each up to `limit` bytes."""
    owners, bucket, filled = [], 0, 0
    for size in reversed(sizes):
        if filled and filled + size > limit:
            bucket, filled = bucket + 1, 0
        owners.append(bucket)
        filled += size
    return owners[::-1]
