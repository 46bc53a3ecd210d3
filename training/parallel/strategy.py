"""How the weights of a model lie on the ranks: as the recipe says, or, with `auto`, whole on each rank where that fits.

    ddp     all weights on every rank
    fsdp    shards over all ranks
    hsdp    shards over the ranks of a node, the same on every node: what is gathered stays within a node

Models that are trained and models that only run follow the same rule. They differ in the bytes of a parameter (model_specs.py).
`auto` shards if all parameters would take more than 70% of a device's memory: the rest is for activations. If a shard would
hold all weights (one process, or `hsdp` with one process a node), it amounts to `ddp`.
"""

import math
from pathlib import Path

import torch
from transformers import PreTrainedModel

from training.contract.config.recipe import Parallel
from training.contract.identity.model_identity import weight_files
from training.contract.identity.safetensors_file import read_places
from training.contract.protocol.events import EventWriter
from training.contract.system.cgroups import memory_bytes
from training.distributed import Group
from training.parallel.model_specs import InferenceModelSpec, ModelSource, TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.replicated import Replicated
from training.parallel.sharded import Sharded
from training.parallel.train_state import TrainableParams

_USABLE = 0.7


def build_masters(trainable: TrainModelSpec, parallel: Parallel, group: Group, events: EventWriter) -> TrainableParams:
    """The model to train, loaded onto the ranks. Raises ModelError."""
    layout = choose_layout(trainable, parallel, group, events)
    return Sharded(trainable, layout) if layout.is_sharded else Replicated(trainable, layout)


def load_frozen(frozen: InferenceModelSpec, parallel: Parallel, group: Group, events: EventWriter) -> PreTrainedModel:
    """A model that only runs, loaded onto the ranks. Raises ModelError."""
    return choose_layout(frozen, parallel, group, events).place(frozen.load)


def choose_layout(source: ModelSource, parallel: Parallel, group: Group, events: EventWriter) -> Placement:
    """Choose the layout for the weights of `source`, and note it. Raises ModelError."""
    chosen, why = choose(source, parallel, group, device_bytes(group))
    layout = Placement(group, {"ddp": group.world, "fsdp": 1, "hsdp": group.nodes}[chosen])
    if group.world > 1:
        part = f"in {layout.shards} shards, {layout.copies} times" if layout.is_sharded else "whole on each"
        events.note(f"{group.world} processes, weights {part} ({chosen}: {why})")
    return layout


def choose(source: ModelSource, parallel: Parallel, group: Group, own_bytes: int) -> tuple[Parallel, str]:
    """`ddp`, `fsdp` or `hsdp`, and why; `own_bytes` is the memory of this rank's device. Raises ModelError."""
    if parallel != "auto":
        return parallel, "as the recipe says"
    needed = _parameters(source.folder) * source.parameter_bytes
    # Machines may differ, and all ranks must make the same choice.
    there = int(group.gather_rows(torch.tensor([own_bytes], device=group.device)).min())
    figures = f"{needed / 2**30:.2f} GiB besides activations, a device has {there / 2**30:.2f} GiB"
    return "ddp" if needed <= _USABLE * there else "fsdp", f"{source.work} takes {figures}"


def device_bytes(group: Group) -> int:
    """The memory of this rank's device: of its GPU, or its part of the machine's, or of the container's."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    return memory_bytes() * group.nodes // group.world


def _parameters(folder: Path) -> int:
    """How many parameters the model has, from the headers of its files."""
    return sum(math.prod(place.shape) for file in weight_files(folder) for place in read_places(file))
