"""How the weights of a model lie on the ranks: whole on each, or cut by rows into shards, and how they get there.

Rank 0 reads a model, with all that reading refuses. The others build its form on torch's meta device, where a tensor has
no numbers; which tensors there are, of which dtype, and which of them are one (tied weights), they are told. Then the
numbers are broadcast a part of the model at a time, and each rank keeps of the part what it is to have before the next
one comes. So the machine never holds more than one whole copy beside what the ranks keep, and one process reads the disk.

Shards are those of FSDP2 (Zhao et al. 2023): each decoder layer gathers its weights before its pass and forgets them after;
embedding, last norm and head stay from the forward to the backward pass, since tied weights are both the first and the
last thing a pass needs. Their gathering is tied to the model's forward pass, and the head is used outside of it: so the
part of `response_logprobs` that touches weights is made known to FSDP as a forward pass too (`hook_passes`). Every pass is
then an exchange, so all ranks run equally many, also of the rows of a model that cannot share prefixes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.distributed import Group
from training.model.logprobs import hook_passes

# Loads a model onto a device; on the meta device its form alone.
Load = Callable[[torch.device], PreTrainedModel]


@dataclass(frozen=True)
class Layout:
    """The ranks of `group` hold all weights `copies` times; ranks next to each other share a copy."""

    group: Group
    copies: int

    @property
    def shards(self) -> int:
        """Into how many parts each copy is cut."""
        return self.group.world // self.copies

    @property
    def is_sharded(self) -> bool:
        return self.shards > 1

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.group.device.type, (self.copies, self.shards), mesh_dim_names=("copy", "shard"))

    def place(self, load: Load, precision: MixedPrecisionPolicy | None = None) -> PreTrainedModel:
        """The model that `load` gives, laid out on all ranks. Raises ModelError on every rank where rank 0 meets one."""
        arriving = _Arriving(load, self.group)
        model = arriving.model
        if not self.is_sharded:
            arriving.take(model)
            return model
        mesh = self.mesh if self.copies > 1 else self.mesh["shard"]
        for part in [*_layers(model), model]:
            arriving.take(part)
            fully_shard(part, mesh=mesh, mp_policy=precision or MixedPrecisionPolicy())
        hook_passes(model, self.group)
        return model


class _Place(NamedTuple):
    """A tensor as rank 0 has it; those of one `owner` are one tensor, that of the first of their names."""

    name: str
    owner: str
    dtype: str
    shape: list[int]
    requires_grad: bool


class _Arriving:
    """A model that is whole on rank 0's host, and whose form alone the other ranks have, until they `take` its parts."""

    def __init__(self, load: Load, group: Group) -> None:
        self._group = group
        self.model = _load(load, group)
        own = _places(self.model)
        told = group.gather_texts(json.dumps(own) if group.is_main else "")[0]
        self._left = {place.name: place for place in (_Place(*fields) for fields in json.loads(told))}
        _demand_same_form(own, self._left)
        self._names = {module: name for name, module in self.model.named_modules()}

    def take(self, part: Module) -> None:
        """Have what is left of `part` on the device of every rank. What is one tensor on rank 0 is one everywhere."""
        prefix = f"{self._names[part]}." if self._names[part] else ""
        arrived: dict[str, Tensor] = {}
        for name in [name for name in self._left if name.startswith(prefix)]:
            place = self._left.pop(name)
            if place.owner not in arrived:
                arrived[place.owner] = self._receive(place)
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, arrived[place.owner])

    def _receive(self, place: _Place) -> Tensor:
        if place.name != place.owner:
            raise ModelError(
                f"{place.name} and {place.owner} are one tensor, and layers that are gathered one at a time cannot share any: "
                f"set `compute.parallel: ddp`"
            )
        path, _, leaf = place.name.rpartition(".")
        own: Tensor = getattr(self.model.get_submodule(path), leaf)
        if self._group.is_main:
            whole = own.detach().to(self._group.device).contiguous()
        else:
            whole = torch.empty(place.shape, dtype=getattr(torch, place.dtype), device=self._group.device)
        self._group.broadcast_(whole.view(-1).view(torch.uint8))  # as bytes: not every backend knows every dtype
        return Parameter(whole, place.requires_grad) if isinstance(own, Parameter) else whole


def _load(load: Load, group: Group) -> PreTrainedModel:
    """The model on rank 0's host, and its form elsewhere. A model that one rank cannot load no rank goes on without."""
    problem, model = "", None
    try:
        model = load(torch.device("cpu" if group.is_main else "meta"))
    except ModelError as error:
        problem = str(error)
    group.barrier()  # patient: a large model takes longer to read than ranks otherwise wait for each other
    problems = list(filter(None, group.gather_texts(problem)))
    if model is None or problems:
        raise ModelError(problems[0])
    return model


def _demand_same_form(own: list[_Place], told: dict[str, _Place]) -> None:
    """Rank 0's model as it was read must have the tensors that its config alone says it has."""
    built = {place.name: place.shape for place in own}
    other = sorted(n for n in built.keys() | told.keys() if n not in told or built.get(n) != told[n].shape)
    if other:
        raise ModelError(
            f"the model as it was read and the one its config.json describes differ in {len(other)} tensors, among them "
            f"{', '.join(other[:5])}; such a model cannot be brought to several processes: set "
            f"`compute.processes_per_node: 1`, or save it as plain weights"
        )


def _places(model: PreTrainedModel) -> list[_Place]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    owners: dict[int, str] = {}
    return [
        _Place(
            name, owners.setdefault(id(t), name), str(t.dtype).removeprefix("torch."), list(t.shape), t.requires_grad
        )
        for name, t in named
    ]


def _layers(model: PreTrainedModel) -> list[Module]:
    """The layers that transformers says must stay in one piece. Raises ModelError if it knows of none."""
    layers = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} names no layers (`_no_split_modules` of transformers) that could be gathered one at a "
            f"time, so every rank would need room for all of it: set `compute.parallel: ddp`, or use another base model"
        )
    return layers
