"""How the weights of a model lie on the ranks (complete on each, or cut by rows into shards), and how they get there.

Only rank 0 reads the model from the disk and checks it. The other ranks build it on torch's meta device, without values, and
get names, dtypes and ties of the tensors from rank 0. Then the values are broadcast a layer at a time. Each rank keeps its
part of a layer before the next one comes. So a node holds at most one full copy besides the parts of its ranks.

Shards are made by FSDP2 (Zhao et al. 2023). Each decoder layer gathers its weights before its pass and frees them after it.
Embedding, last norm and head stay gathered from the forward to the backward pass: tied weights are the first and the last
weights of a pass. FSDP gathers weights in the model's forward pass, but we use the head outside of it. So the part of
`response_logprobs` that reads weights is registered as a forward method too (`register_fsdp_forward`). Every pass is then
collective: all ranks must run the same number of passes, even if the model cannot share prefixes.
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

# Loads a model onto a device, without values if it is the meta device.
Load = Callable[[torch.device], PreTrainedModel]


@dataclass(frozen=True)
class Placement:
    """The ranks of `group` hold `copies` copies of all weights. Consecutive ranks share a copy."""

    group: Group
    copies: int

    @property
    def shards(self) -> int:
        """Return the number of parts of each copy."""
        return self.group.world // self.copies

    @property
    def is_sharded(self) -> bool:
        return self.shards > 1

    @cached_property
    def mesh(self) -> DeviceMesh:
        return mesh_of(self.group, {"copy": self.copies, "shard": self.shards})

    def place(self, load: Load, precision: Precision = AS_LOADED) -> PreTrainedModel:
        """Return the model of `load`, distributed over all ranks. Shards run in `precision`.

        Raise ModelError on every rank if any rank fails to load.
        """
        broadcast = _Broadcast(load, self.group)
        model = broadcast.model
        if not self.is_sharded:
            broadcast.fill(model)
            return model
        mesh = self.mesh if self.copies > 1 else self.mesh["shard"]
        separate = precision.modules_apart(model)
        for part in [*_layers(model), model]:
            broadcast.fill(part)
            inner_first = [m for m in reversed(list(part.modules())) if m in separate and not isinstance(m, FSDPModule)]
            for module in [*inner_first, part]:
                fully_shard(module, mesh=mesh, mp_policy=precision.policy(separate.get(module, precision.usual)))
        precision.cast_buffers(model)
        register_fsdp_forward(model, self.group)
        return model


class _TensorInfo(NamedTuple):
    """A tensor of rank 0's model. Tied tensors have the same `owner`, the first of their names."""

    name: str
    owner: str
    dtype: str
    shape: list[int]
    requires_grad: bool


class _Broadcast:
    """Copies a model from rank 0's host to the devices of all ranks, part by part."""

    def __init__(self, load: Load, group: Group) -> None:
        self._group = group
        self.model = _load(load, group)
        own = _tensors_of(self.model)
        message = group.gather_texts(json.dumps(own) if group.is_main else "")[0]
        self._unsent = {info.name: info for info in (_TensorInfo(*fields) for fields in json.loads(message))}
        _check_same_tensors(own, self._unsent)
        self._names = {module: name for name, module in self.model.named_modules()}

    def fill(self, part: Module) -> None:
        """Copy the unsent tensors of `part` to the device of every rank. Tied tensors stay tied."""
        prefix = f"{self._names[part]}." if self._names[part] else ""
        received: dict[str, Tensor] = {}
        for name in [name for name in self._unsent if name.startswith(prefix)]:
            info = self._unsent.pop(name)
            if info.owner not in received:
                received[info.owner] = self._receive(info)
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, received[info.owner])

    def _receive(self, info: _TensorInfo) -> Tensor:
        if info.name != info.owner:
            raise ModelError(
                f"{info.name} and {info.owner} are one tensor, but layers in shards cannot share tensors: set "
                "`compute.parallel: ddp`",
                "shared-tensors",
            )
        path, _, leaf = info.name.rpartition(".")
        own: Tensor = getattr(self.model.get_submodule(path), leaf)
        if self._group.is_main:
            values = own.detach().to(self._group.device).contiguous()
        else:
            values = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=self._group.device)
        self._group.broadcast_(values.view(-1).view(torch.uint8))  # as bytes: not every backend supports every dtype
        return Parameter(values, info.requires_grad) if isinstance(own, Parameter) else values


def _load(load: Load, group: Group) -> PreTrainedModel:
    """Return the model on rank 0's host, and without values elsewhere. Raise ModelError on every rank if one cannot load it."""
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
    """Raise ModelError unless the model built from the config has the tensors of rank 0's model, read from files."""
    built = {info.name: info.shape for info in own}
    different = sorted(n for n in built.keys() | sent.keys() if n not in sent or built.get(n) != sent[n].shape)
    if different:
        raise ModelError(
            f"the model in the files and the model of its config.json differ in {len(different)} tensors, among them "
            f"{', '.join(different[:5])}; several processes cannot load such a model: set "
            "`compute.processes_per_node: 1`, or save it as plain weights",
            "tensors-differ",
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
    """Return the outermost layers among transformers' `_no_split_modules`. Raise ModelError if it names none."""
    unsplit = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]
    inner = {part for layer in unsplit for part in layer.modules() if part is not layer}
    layers = [layer for layer in unsplit if layer not in inner]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not name its layers (`_no_split_modules` of transformers), so it cannot be sharded "
            "layer by layer: set `compute.parallel: ddp`, or use another base model",
            "no-layers",
        )
    return layers
