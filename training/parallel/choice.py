"""Which way the ranks share a model: as the recipe says, or, with `auto`, replicated where that fits.

In training a parameter takes 16 bytes: the float32 master, its gradient and two moments of AdamW; two more for a running
copy in bfloat16. Beside an adapter, which itself is small, a parameter is frozen and takes no more than its value. `auto`
shards where all that is more than a part of a device's memory: the rest is for activations.

    ddp     all weights on every rank
    fsdp    shards over all ranks
    hsdp    shards over the ranks of a node, the same on every node: what is gathered stays within a node

Whatever leaves every rank with all weights is `ddp`: one process, or `hsdp` with one process a node.
"""

import math
import os
from pathlib import Path

import torch

from training.contract.events import EventWriter
from training.contract.recipe import Parallel
from training.contract.tensor_file import read_places
from training.contract.weights import weight_files
from training.distributed import Group
from training.parallel.masters import Masters, Untrained
from training.parallel.replicated import Replicated
from training.parallel.sharded import Sharded

_BYTES = {"float32": 16, "bfloat16": 18}
_FROZEN_BYTES = {"float32": 4, "bfloat16": 2}
_PART = 0.7


def build_masters(untrained: Untrained, parallel: Parallel, group: Group, events: EventWriter) -> Masters:
    """What is to be trained, loaded; which way its weights are shared is noted. Raises ModelError."""
    chosen, why = choose(untrained, parallel, group)
    copies = {"ddp": group.world, "fsdp": 1, "hsdp": group.nodes}[chosen]
    if group.world > 1:
        part = f"in {group.world // copies} shards, {copies} times" if copies < group.world else "whole on each"
        events.note(f"{group.world} processes, weights {part} ({chosen}: {why})")
    return Replicated(untrained, group) if copies == group.world else Sharded(untrained, group, copies)


def choose(untrained: Untrained, parallel: Parallel, group: Group) -> tuple[Parallel, str]:
    """The way to share, and why. Raises ModelError for weights that cannot be read."""
    if parallel != "auto":
        return parallel, "as the recipe says"
    of_each = (_BYTES if untrained.adapter is None else _FROZEN_BYTES)[untrained.precision]
    needed, own = _count(untrained.folder) * of_each, torch.tensor([device_bytes(group)], device=group.device)
    there = int(group.gather_rows(own).min())  # machines may differ, and all ranks must choose alike
    chosen: Parallel = "ddp" if needed <= _PART * there else "fsdp"
    return chosen, f"training takes {needed / 2**30:.2f} GiB beside activations, a device has {there / 2**30:.2f} GiB"


def device_bytes(group: Group) -> int:
    """The memory of this rank's device: of its GPU, or its part of the machine's."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * group.nodes // group.world


def _count(folder: Path) -> int:
    """Parameters of the model, from the headers of its files."""
    return sum(math.prod(place.shape) for file in weight_files(folder) for place in read_places(file))
