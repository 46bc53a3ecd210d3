"""Training with each tensor in shards over the ranks of a group (training.parallel.placement): FSDP2; HSDP has several groups.

The master weights are the float32 shards. FSDP casts gathered weights to the dtypes of a model loaded in the trained
precision, and sums gradients in float32. It sums over the ranks of a group in each backward pass, so that no rank holds a
full gradient, and over the groups in the last one.

The optimizer steps plain tensors, the local rows of each parameter. AdamW works element by element; for Muon, ranks collect
whole matrices in turn.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from training.checkpoint.tensor_slices import LocalRows
from training.contract.errors import ModelError
from training.model.backbone import architecture, text_config
from training.optim.distributed_muon import MatrixAssignment
from training.parallel.matrix_ownership import ShardedAssignment
from training.parallel.model_specs import TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.train_state import TrainableParams


class Sharded(TrainableParams):
    """Parameters in shards."""

    def __init__(self, trainable: TrainModelSpec, layout: Placement) -> None:
        precision = trainable.running_precision()
        model = layout.place(partial(trainable.load, master_weights=True), precision)
        self._dtypes = precision.dtypes
        self._reduce_scatter = _ReduceScatter(layout.group.device)
        _sum_gradients(model, self._reduce_scatter)
        self._shards_of = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parameters = {name: Parameter(p.detach().to_local()) for name, p in self._shards_of.items()}
        super().__init__(model, parameters, trainable, layout)
        if layout.shards > 1 and self.own_dropout and getattr(text_config(model), "layerdrop", None):
            raise ModelError(  # ranks with different layers would deadlock
                f"{architecture(model)} skips layers at random, different ones on each rank (`layerdrop` of its config.json), "
                "but with shards all ranks must run all layers: set `compute.parallel: ddp`, or `layerdrop` to 0",
                "layerdrop",
            )

    @cached_property
    def turns(self) -> MatrixAssignment:
        return ShardedAssignment(self._shard_group, self._row_counts)

    def zero(self) -> None:
        self._reduce_scatter.finite.fill_(True)
        for name, sharded in self._shards_of.items():
            sharded.grad = self.parameters[name].grad = None

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_requires_all_reduce(last)
        loss.backward()

    def reduce(self) -> Tensor:
        """Return whether this rank's gradients were finite. FSDP summed them already; unused tensors get zeros."""
        for name, parameter in self.parameters.items():
            gradient = self._shards_of[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.to_local()
        return self._reduce_scatter.finite

    def norm(self) -> Tensor:
        square = super().norm().double().square()
        dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def update_model(self) -> None:
        """Free weights that a forward pass without a backward pass left gathered. The optimizer has stepped the shards."""
        self.model.reshard()

    def local_rows(self, name: str) -> LocalRows:
        copy, shard = divmod(self.group.rank, self.layout.shards)
        counts = self._row_counts(name)
        return LocalRows(sum(counts[:shard]), counts[shard], sum(counts), copy, self.layout.copies)

    def full_weights(self) -> dict[str, Tensor]:
        """Gather one tensor at a time, so that a device needs memory for only one."""
        state, gathered = self._state(), dict[int, Tensor]()
        for name, tensor in state.items():
            if id(tensor) not in gathered:  # tied weights have two names
                full = tensor.detach().to(self._dtypes[name])
                if isinstance(full, DTensor):
                    full = full.full_tensor()
                gathered[id(tensor)] = full.cpu() if self.group.is_main else full.new_empty(0)
        return {name: gathered[id(tensor)] for name, tensor in state.items()} if self.group.is_main else {}

    @property
    def _shard_group(self) -> dist.ProcessGroup:
        return self.layout.mesh["shard"].get_group()

    def _row_counts(self, name: str) -> list[int]:
        """Return the rows on each rank, as `torch.chunk` cuts them: the last parts may be smaller or empty."""
        total, shards = self._shards_of[name].shape[0], self.layout.shards
        size = -(-total // shards)
        return [max(0, min(size, total - size * shard)) for shard in range(shards)]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]


class _ReduceScatter:
    """FSDP's reduce-scatter, with a check that this rank's input is finite."""

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
        return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def _sum_gradients(model: PreTrainedModel, reduce_scatter: _ReduceScatter) -> None:
    """Make FSDP sum the gradients of every part of `model` with `reduce_scatter`."""
    for part in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        part.set_gradient_divide_factor(1.0)  # losses are already divided by the global count
        part.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
        part.set_custom_reduce_scatter(reduce_scatter)
