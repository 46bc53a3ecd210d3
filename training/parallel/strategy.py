"""The choice of a placement: the one in the recipe, or with `auto` the simplest that fits.

    ddp     all weights on every rank
    fsdp    shards over all ranks
    hsdp    shards over the ranks of a node, the same on every node; weights are gathered within a node

Trained models and models that only score follow the same rule; they differ in the bytes per parameter (model_specs.py).
`auto` shards if all parameters would take more than 70% of a device's memory: the rest is for activations. With one rank per
copy (one process, or `hsdp` with one process per node) the result equals `ddp`.
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


def build_params(trainable: TrainModelSpec, parallel: Parallel, group: Group, events: EventWriter) -> TrainableParams:
    """Return the model to train, loaded onto the ranks. Raise ModelError."""
    layout = choose_layout(trainable, parallel, group, events)
    return Sharded(trainable, layout) if layout.is_sharded else Replicated(trainable, layout)


def load_frozen(frozen: InferenceModelSpec, parallel: Parallel, group: Group, events: EventWriter) -> PreTrainedModel:
    """Return a model that only scores, loaded onto the ranks. Raise ModelError."""
    return choose_layout(frozen, parallel, group, events).place(frozen.load)


def choose_layout(source: ModelSource, parallel: Parallel, group: Group, events: EventWriter) -> Placement:
    """Return the placement for the weights of `source`, and write a note. Raise ModelError."""
    strategy, reason = choose(source, parallel, group, device_bytes(group))
    layout = Placement(group, {"ddp": group.world, "fsdp": 1, "hsdp": group.nodes}[strategy])
    if group.world > 1:
        part = f"in {layout.shards} shards, {layout.copies} copies" if layout.is_sharded else "complete on each"
        events.note(f"{group.world} processes, weights {part} ({strategy}: {reason})")
    return layout


def choose(source: ModelSource, parallel: Parallel, group: Group, own_bytes: int) -> tuple[Parallel, str]:
    """Return `ddp`, `fsdp` or `hsdp`, and the reason. `own_bytes`: memory of this rank's device. Raise ModelError."""
    if parallel != "auto":
        return parallel, "set by the recipe"
    needed = _count_parameters(source.folder) * source.parameter_bytes
    # Nodes may differ, but all ranks must make the same choice.
    available = int(group.gather_rows(torch.tensor([own_bytes], device=group.device)).min())
    figures = f"{needed / 2**30:.2f} GiB besides activations, a device has {available / 2**30:.2f} GiB"
    return "ddp" if needed <= _USABLE * available else "fsdp", f"{source.work} takes {figures}"


def device_bytes(group: Group) -> int:
    """Return the memory of this rank's GPU, or its share of the memory of the machine or container."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    return memory_bytes() * group.nodes // group.world


def _count_parameters(folder: Path) -> int:
    """Return the number of parameters, from the headers of the weight files."""
    return sum(math.prod(tensor.shape) for file in weight_files(folder) for tensor in read_places(file))
