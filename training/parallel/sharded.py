"""Each tensor cut by rows over the ranks of a group: FSDP2 (Zhao et al. 2023), and HSDP, several such groups side by side.

Every decoder layer gathers its weights before its pass and forgets them after; embedding, last norm and head stay from the
forward to the backward pass, since tied weights are both the first and the last thing a pass needs. Their
gathering is tied to the model's forward pass, and the head is used outside of it: so the part of `response_logprobs`
that touches weights is made known to FSDP as a forward pass too (`hook_passes`).

Masters are the float32 shards; FSDP rounds what it gathers to the trained precision, and sums gradients in float32,
over a group in each backward pass, so that no rank ever holds a whole gradient, and over the groups in the last one.
A pass is an exchange, so all ranks run equally many.

The optimizer steps plain tensors, the local rows of each parameter: all of it is element by element.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from training.contract.recipe import Dtype
from training.distributed import Group
from training.model.load import DTYPES
from training.model.logprobs import hook_passes
from training.parallel.masters import Masters, Untrained
from training.pieces import Held


class Sharded(Masters):
    """Shards over `group.world / copies` ranks, `copies` times; ranks next to each other make a group."""

    in_lockstep = True

    def __init__(self, untrained: Untrained, group: Group, copies: int) -> None:
        precision = untrained.precision
        model = untrained.load("float32", torch.device("cpu"))  # FSDP moves each shard to the device
        self._copies, self._shards = copies, group.world // copies
        mesh = init_device_mesh(group.device.type, (copies, self._shards), mesh_dim_names=("copy", "shard"))
        self._shard_group = mesh["shard"].get_group()
        self._reduce_scatter = _Watched(group.device)
        _shard(model, mesh if copies > 1 else mesh["shard"], precision, self._reduce_scatter)
        hook_passes(model)
        self._shards_of = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parameters = {name: Parameter(p.detach().to_local()) for name, p in self._shards_of.items()}
        super().__init__(model, parameters, precision, group)

    def zero(self) -> None:
        self._reduce_scatter.finite.fill_(True)
        for name, sharded in self._shards_of.items():
            sharded.grad = self.parameters[name].grad = None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_requires_all_reduce(last)
        loss.backward()

    def reduce(self) -> Tensor:
        """The last backward pass did the work. A tensor that none of the passes used has a gradient of zero."""
        for name, parameter in self.parameters.items():
            gradient = self._shards_of[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.to_local()
        return self._reduce_scatter.finite

    def norm(self) -> Tensor:
        square = super().norm().double().square()
        dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def publish(self) -> None:
        """The shards are the optimizer's tensors; what a pass without a backward pass has left gathered is forgotten."""
        self.model.reshard()

    def held(self, name: str) -> Held:
        """Rows are cut as by `torch.chunk`: all parts equal but the last, and the ones after it empty."""
        of, (copy, shard) = self._shards_of[name].shape[0], divmod(self.group.rank, self._shards)
        first = min(of, -(-of // self._shards) * shard)
        return Held(first, len(self.parameters[name]), of, copy, self._copies)

    def full_weights(self) -> dict[str, Tensor]:
        """Gathered a tensor at a time, so that no device needs room for more than one."""
        state, whole = self.model.state_dict(keep_vars=True), dict[int, Tensor]()
        for tensor in state.values():
            if id(tensor) not in whole:  # tied weights have two names
                full = self._full(tensor)
                whole[id(tensor)] = full.cpu() if self.group.is_main else full.new_empty(0)
        return {name: whole[id(tensor)] for name, tensor in state.items()} if self.group.is_main else {}

    def _full(self, tensor: Tensor) -> Tensor:
        rounded = tensor.detach().to(self.dtype) if isinstance(tensor, Parameter) else tensor
        full: Tensor = rounded.full_tensor() if isinstance(rounded, DTensor) else rounded
        return full

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]


class _Watched:
    """FSDP's reduce-scatter; notes before whether what this rank gives is finite, which no sum tells afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.finite &= input_tensor.sum().isfinite()
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _shard(model: PreTrainedModel, mesh: DeviceMesh, precision: Dtype, reduce_scatter: _Watched) -> None:
    """Shard each layer that transformers says must stay in one piece, and what is left with the model itself."""
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    layers = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]
    for part in [*layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)  # sums: losses are divided by the global count already
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        part.set_custom_reduce_scatter(reduce_scatter)
