"""Copies to a GPU that nobody waits for.

From ordinary memory such a copy ends before the call does, and it begins when the GPU has done all it was given before:
the processor stands still meanwhile, and has nothing ready for the GPU afterwards. From pinned memory the GPU fetches it
in its turn.
"""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; to a GPU by way of pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # pinned by a thread that knows no device, it would belong to the first GPU
        return tensor.pin_memory().to(device, non_blocking=True)
