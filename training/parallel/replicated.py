"""Training with all weights on every rank. One gradient buffer is summed over the ranks during the last backward pass.

With precision float32 the model's parameters are the master weights. With bfloat16 the running model is a bfloat16 copy: the
gradients of each micro-batch are added to the float32 buffer, and after a step the master weights are rounded into the copy.

All gradients are one flat float32 tensor; each master's `.grad` is a view of it. So the norm is one norm, clipping is one
product, and the ranks exchange slices (`GradientBuckets`). torch's DistributedDataParallel does not fit for three reasons. It
hooks on a forward pass of the full model, but we run only the body. A rank without pairs in a step runs no backward pass. And
it would sum the gradients of a bfloat16 copy in bfloat16.

Legend: N numbers of all trained tensors.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Parameter

from training.checkpoint.tensor_slices import LocalRows
from training.optim.distributed_muon import MatrixAssignment
from training.parallel.gradient_buckets import GradientBuckets
from training.parallel.matrix_ownership import ReplicatedAssignment
from training.parallel.model_specs import TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.train_state import TrainableParams


class Replicated(TrainableParams):
    """Parameters replicated on every rank. `gradient_N` is the concatenation of all gradients."""

    def __init__(self, trainable: TrainModelSpec, layout: Placement) -> None:
        model = layout.place(partial(trainable.load, master_weights=True))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._copied = trainable.precision != "float32"
        if self._copied:
            trained = {name: Parameter(master.detach()) for name, master in trained.items()}
            trainable.running_precision().round_(model)
        super().__init__(model, trained, trainable, layout)
        sizes = [p.numel() for p in trained.values()]
        self.gradient_N = torch.zeros(sum(sizes), dtype=torch.float32, device=self.group.device)
        self._buckets = GradientBuckets(self.gradient_N, sizes, self.group)
        self._attach_gradients(sizes)

    @cached_property
    def turns(self) -> MatrixAssignment | None:
        return ReplicatedAssignment(self.group) if self.group.world > self.group.nodes else None

    def zero(self) -> None:
        self.gradient_N.zero_()
        self._buckets.begin()

    def backward(self, loss: Tensor, last: bool) -> None:
        if last:
            self._buckets.expect()
        loss.backward()

    def reduce(self) -> Tensor:
        return self._buckets.finish()

    def update_model(self) -> None:
        if self._copied:
            running = [self.model.get_parameter(name) for name in self.parameters]
            with torch.no_grad():
                torch._foreach_copy_(running, list(self.parameters.values()))

    def local_rows(self, name: str) -> LocalRows:
        shape = self.parameters[name].shape
        return LocalRows(0, shape[0], shape[0], self.group.rank, self.group.world)

    def full_weights(self) -> dict[str, Tensor]:
        return {n: t.detach() for n, t in self._state().items()} if self.group.is_main else {}

    def _gradients(self) -> list[Tensor]:
        return [self.gradient_N]

    def _attach_gradients(self, sizes: list[int]) -> None:
        parts = zip(self.parameters.items(), self.gradient_N.split(sizes), strict=True)
        for number, ((name, master), part) in enumerate(parts):
            master.grad = part.view_as(master)
            running = self.model.get_parameter(name)
            running.register_post_accumulate_grad_hook(self._hook(number, master.grad))

    def _hook(self, number: int, total: Tensor) -> Callable[[Tensor], None]:
        def hook(running: Tensor) -> None:
            if self._copied:
                assert running.grad is not None
                total.add_(running.grad)
                running.grad = None
            self._buckets.complete(number)

        return hook
