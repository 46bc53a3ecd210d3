"""How the weights of a model lie on the ranks: whole on each, or cut by rows into shards, and how they get there.

Rank 0 alone reads the model from the disk and checks it. The others build it on torch's meta device, without values, and
learn from rank 0 which tensors it has, of which dtype, and which share memory (tied weights). Then the values are broadcast
a layer at a time, and each rank keeps its part of a layer before the next one comes. So the machine never holds more than
one whole copy besides what the ranks keep.

Shards are those of FSDP2 (Zhao et al. 2023): each decoder layer gathers its weights before its pass and frees them after;
embedding, last norm and head stay gathered from the forward to the backward pass, since tied weights are the first and the
last that a pass needs. FSDP gathers for the model's forward pass, but we use the head outside of it. So the part of
`response_logprobs` that reads weights is registered as a forward pass too (`register_fsdp_forward`). Every pass is then
collective: all ranks must run the same number of passes, also for a model that cannot share prefixes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.distributed import Group, mesh_of
from training.model.load import named_tensors
from training.model.logprobs.response_logprobs import register_fsdp_forward
from training.parallel.precision import AS_LOADED, Precision

# Loads a model onto a device; on the meta device without values.
Load = Callable[[torch.device], PreTrainedModel]


@dataclass(frozen=True)
class Placement:
    """The ranks of `group` hold `copies` copies of all weights; consecutive ranks share one."""

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
        return mesh_of(self.group, {"copy": self.copies, "shard": self.shards})

    def place(self, load: Load, precision: Precision = AS_LOADED) -> PreTrainedModel:
        """The model that `load` gives, laid out on all ranks; shards of it run in `precision`.

        Raises ModelError on every rank if rank 0 does.
        """
        broadcast = _Broadcast(load, self.group)
        model = broadcast.model
        if not self.is_sharded:
            broadcast.fill(model)
            return model
        mesh = self.mesh if self.copies > 1 else self.mesh["shard"]
        apart = precision.modules_apart(model)
        for part in [*_layers(model), model]:
            broadcast.fill(part)
            inner_first = [m for m in reversed(list(part.modules())) if m in apart and not isinstance(m, FSDPModule)]
            for module in [*inner_first, part]:
                fully_shard(module, mesh=mesh, mp_policy=precision.policy(apart.get(module, precision.usual)))
        precision.cast_buffers(model)
        register_fsdp_forward(model, self.group)
        return model


class _TensorInfo(NamedTuple):
    """A tensor as rank 0 has it. Tied tensors have the same `owner`, the first of their names."""

    name: str
    owner: str
    dtype: str
    shape: list[int]
    requires_grad: bool


class _Broadcast:
    """Brings a model from rank 0's host to the devices of all ranks, one part of it after the other."""

    def __init__(self, load: Load, group: Group) -> None:
        self._group = group
        self.model = _load(load, group)
        own = _tensors_of(self.model)
        message = group.gather_texts(json.dumps(own) if group.is_main else "")[0]
        self._left = {info.name: info for info in (_TensorInfo(*fields) for fields in json.loads(message))}
        _check_same_tensors(own, self._left)
        self._names = {module: name for name, module in self.model.named_modules()}

    def fill(self, part: Module) -> None:
        """Put the tensors of `part` that were not sent before on the device of every rank. Tied tensors stay tied."""
        prefix = f"{self._names[part]}." if self._names[part] else ""
        received: dict[str, Tensor] = {}
        for name in [name for name in self._left if name.startswith(prefix)]:
            info = self._left.pop(name)
            if info.owner not in received:
                received[info.owner] = self._receive(info)
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, received[info.owner])

    def _receive(self, info: _TensorInfo) -> Tensor:
        if info.name != info.owner:
            raise ModelError(
                f"{info.name} and {info.owner} are one tensor, and layers that are gathered one at a time cannot share any: "
                f"set `compute.parallel: ddp`"
            )
        path, _, leaf = info.name.rpartition(".")
        own: Tensor = getattr(self.model.get_submodule(path), leaf)
        if self._group.is_main:
            whole = own.detach().to(self._group.device).contiguous()
        else:
            whole = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=self._group.device)
        self._group.broadcast_(whole.view(-1).view(torch.uint8))  # as bytes: not every backend knows every dtype
        return Parameter(whole, info.requires_grad) if isinstance(own, Parameter) else whole


def _load(load: Load, group: Group) -> PreTrainedModel:
    """The model on rank 0's host, and without values elsewhere. Raises ModelError on every rank if one cannot load it."""
    problem, model = "", None
    try:
        model = load(torch.device("cpu" if group.is_main else "meta"))
    except ModelError as error:
        problem = str(error)
    problems = list(filter(None, group.gather_texts(problem)))
    if model is None or problems:
        raise ModelError(problems[0])
    return model


def _check_same_tensors(own: list[_TensorInfo], sent: dict[str, _TensorInfo]) -> None:
    """Rank 0's model, read from files, must have the tensors of the model that the others built from its config."""
    built = {info.name: info.shape for info in own}
    other = sorted(n for n in built.keys() | sent.keys() if n not in sent or built.get(n) != sent[n].shape)
    if other:
        raise ModelError(
            f"the model as it was read and the one its config.json describes differ in {len(other)} tensors, among them "
            f"{', '.join(other[:5])}; such a model cannot be loaded by several processes: set "
            f"`compute.processes_per_node: 1`, or save it as plain weights"
        )


def _tensors_of(model: PreTrainedModel) -> list[_TensorInfo]:
    owners: dict[int, str] = {}
    return [
        _TensorInfo(
            name, owners.setdefault(id(t), name), str(t.dtype).removeprefix("torch."), list(t.shape), t.requires_grad
        )
        for name, t in named_tensors(model)
    ]


def _layers(model: PreTrainedModel) -> list[Module]:
    """The layers that transformers keeps in one piece (`_no_split_modules`). Raises ModelError if it names none."""
    named = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]
    inner = {part for layer in named for part in layer.modules() if part is not layer}
    layers = [layer for layer in named if layer not in inner]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} names no layers (`_no_split_modules` of transformers) that could be gathered one at a "
            f"time, so every rank would need room for all of it: set `compute.parallel: ddp`, or use another base model"
        )
    return layers
