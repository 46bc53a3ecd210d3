"""How weights lie on the ranks of a job: as the recipe says, or, with `auto`, whole on each rank where that fits.

    ddp     all weights on every rank
    fsdp    shards over all ranks
    hsdp    shards over the ranks of a node, the same on every node: what is gathered stays within a node

It is one choice for what is trained and for what is only run, and differs by what a parameter takes there
(training.parallel.models). `auto` shards where all parameters take more than a part of a device's memory: the rest is for
activations. Whatever leaves every rank with all weights is `ddp`: one process, or `hsdp` with one process a node.
"""

import math
from pathlib import Path

import torch

from training.contract.events import EventWriter
from training.contract.machine import memory_bytes
from training.contract.recipe import Parallel
from training.contract.tensor_file import read_places
from training.contract.weights import weight_files
from training.distributed import Group
from training.parallel.layout import Layout
from training.parallel.masters import Masters
from training.parallel.models import ModelSource, TrainableModel
from training.parallel.replicated import Replicated
from training.parallel.sharded import Sharded

_PART = 0.7


def build_masters(trainable: TrainableModel, parallel: Parallel, group: Group, events: EventWriter) -> Masters:
    """What is to be trained, loaded. Raises ModelError."""
    layout = lay_out_weights(trainable, parallel, group, events)
    return Sharded(trainable, layout) if layout.is_sharded else Replicated(trainable, layout)


def lay_out_weights(source: ModelSource, parallel: Parallel, group: Group, events: EventWriter) -> Layout:
    """How the weights of `source` are to lie on the ranks, of which a note is made. Raises ModelError."""
    chosen, why = choose(source, parallel, group, device_bytes(group))
    layout = Layout(group, {"ddp": group.world, "fsdp": 1, "hsdp": group.nodes}[chosen])
    if group.world > 1:
        part = f"in {layout.shards} shards, {layout.copies} times" if layout.is_sharded else "whole on each"
        events.note(f"{group.world} processes, weights {part} ({chosen}: {why})")
    return layout


def choose(source: ModelSource, parallel: Parallel, group: Group, own_bytes: int) -> tuple[Parallel, str]:
    """The way to share, and why; `own_bytes` is the memory of this rank's device. Raises ModelError for unreadable weights."""
    if parallel != "auto":
        return parallel, "as the recipe says"
    needed, own = _count(source.folder) * source.parameter_bytes, torch.tensor([own_bytes], device=group.device)
    there = int(group.gather_rows(own).min())  # machines may differ, and all ranks must choose alike
    figures = f"{needed / 2**30:.2f} GiB beside activations, a device has {there / 2**30:.2f} GiB"
    return "ddp" if needed <= _PART * there else "fsdp", f"{source.work} takes {figures}"


def device_bytes(group: Group) -> int:
    """The memory of this rank's device: of its GPU, or its part of the machine's, or of the container's."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    return memory_bytes() * group.nodes // group.world


def _count(folder: Path) -> int:
    """Parameters of the model, from the headers of its files."""
    return sum(math.prod(place.shape) for file in weight_files(folder) for place in read_places(file))
