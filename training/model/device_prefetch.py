"""Prefetching: a thread collates the next micro-batch, and copies to a GPU do not block.

A copy from pageable memory to a GPU starts after all queued work and blocks the CPU until it is done. A copy from pinned
memory is queued like any other work.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Ready = TypeVar("Ready")


def prefetch(make_ready: Callable[[Item], Ready], items: Sequence[Item]) -> Iterator[tuple[Item, Ready]]:
    """Yield each item with `make_ready(item)`. A thread computes it while the caller uses the previous item.

    An exception of `make_ready` is raised when its item is due.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        pending = [thread.submit(make_ready, item) for item in items[:1]]
        for number, item in enumerate(items, 1):
            ready = pending.pop().result()
            pending += [thread.submit(make_ready, following) for following in items[number : number + 1]]
            yield item, ready


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. Copy to a GPU through pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # pinning uses the thread's current device, by default GPU 0
        return tensor.pin_memory().to(device, non_blocking=True)
