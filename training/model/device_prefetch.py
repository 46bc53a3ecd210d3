"""Keeping a GPU fed: micro-batches are collated one ahead, in a thread, and copied without anybody waiting.

A copy from ordinary memory to a GPU blocks the caller until it is done, and begins only after all the work queued before it:
the processor idles meanwhile. A copy from pinned memory is queued like any other work.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Ready = TypeVar("Ready")


def prefetch(make_ready: Callable[[Item], Ready], items: Sequence[Item]) -> Iterator[tuple[Item, Ready]]:
    """Each item with what `make_ready` gives for it, made in a thread while the previous item is in use, one at a time.

    What it raises is raised when its item's turn comes.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        coming = [thread.submit(make_ready, item) for item in items[:1]]
        for number, item in enumerate(items, 1):
            ready = coming.pop().result()
            coming += [thread.submit(make_ready, following) for following in items[number : number + 1]]
            yield item, ready


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; to a GPU by way of pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # a thread has its own current device, GPU 0 at first, and pinning uses it
        return tensor.pin_memory().to(device, non_blocking=True)
