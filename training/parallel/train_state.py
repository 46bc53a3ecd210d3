"""A model in training: float32 master weights, their gradients, and the running model in the trained precision.

    zero()                    before a step: clear the gradients
    backward(loss, last)      for each micro-batch; `last` marks the last one of this rank
    reduce()                  sum the gradients over all ranks
    norm(), clip_()           for the gradient of the full model
    update_model()            after the optimizer's step: copy the new weights into the running model

There are two implementations with one interface. With `Replicated` every rank holds all weights, and ranks exchange gradients
(as in DDP). With `Sharded` every rank holds a part of each tensor, and ranks also exchange weights (FSDP). Gradients are sums,
never means: the losses are divided by the count of the global batch.

With an adapter only the adapter has master weights and gradients; the rest of the model is frozen.

With precision bfloat16 the running model is the master weights rounded to bfloat16, like a reference model loaded in bfloat16.
So both compute the same log-probs before the first step. We do not use autocast: it would run norms and the residual stream in
float32, unlike the reference model.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from training.checkpoint.tensor_slices import LocalRows
from training.model.adapter import adapter_parameters, train_mode
from training.model.backbone import text_config
from training.model.load import DTYPES
from training.optim.distributed_muon import MatrixAssignment
from training.parallel.model_specs import TrainModelSpec
from training.parallel.placement import Placement

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_PIECE = 1 << 16


class TrainableParams(ABC):
    """`model` runs. The optimizer steps `parameters`: this rank's part of each trained tensor, in float32."""

    def __init__(
        self, model: PreTrainedModel, parameters: dict[str, Parameter], trainable: TrainModelSpec, layout: Placement
    ) -> None:
        self.model, self.parameters, self.layout, self.group = model, parameters, layout, layout.group
        self.dtype = DTYPES[trainable.precision]
        self._disable_dropout = trainable.disable_dropout

    def train(self) -> None:
        """Put the running model into training mode."""
        train_mode(self.model, self.own_dropout)

    @cached_property
    def own_dropout(self) -> bool:
        """Return whether training draws the dropout of the model's config."""
        if self._disable_dropout:
            return False
        fields = text_config(self.model).to_dict().items()
        return any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields)

    @property
    @abstractmethod
    def turns(self) -> MatrixAssignment | None:
        """Return how ranks share whole matrices; None if this rank shares none. Collective."""

    @abstractmethod
    def zero(self) -> None:
        """Clear the gradients of the previous step."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`. `last`: this is the rank's last pass of the step."""

    @abstractmethod
    def reduce(self) -> Tensor:
        """Make each `.grad` the sum over all ranks. Return, as a tensor, whether this rank's part was finite.

        Every rank calls this once per step, even without a micro-batch.
        """

    def norm(self) -> Tensor:
        """Return the norm of the full gradient, the same on every rank."""
        return norm_of(self._gradients())

    def clip_(self, norm: float, limit: float) -> None:
        """Scale the gradient down to a norm of `limit` if it is larger."""
        factor = limit / (norm + _EPSILON)
        if factor < 1:
            torch._foreach_mul_(self._gradients(), factor)

    @abstractmethod
    def update_model(self) -> None:
        """Copy the weights in `parameters` into the running model."""

    @abstractmethod
    def local_rows(self, name: str) -> LocalRows:
        """Return the rows of the trained tensor `name` that this rank holds."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """Return the full trained weights of the model or adapter in the running precision, on rank 0 only. Collective."""

    def _state(self) -> dict[str, Tensor]:
        """Return this rank's part of the state of the running model, or of its adapter."""
        state: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return {name: state[name] for name in adapter_parameters(self.model)} or state

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """Return tensors that together hold exactly this rank's gradients."""


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors, from norms of small pieces: one float32 sum of millions of squares is off by 1e-3.

    The pieces of a tensor are the rows of a matrix, and a remainder: this takes two kernels on a GPU.
    """
    norms = []
    for flat_N in (tensor.view(-1) for tensor in tensors):
        pieces = len(flat_N) // _PIECE
        norms += [flat_N[: pieces * _PIECE].view(pieces, _PIECE).norm(dim=1), flat_N[pieces * _PIECE :].norm().view(1)]
    norm: Tensor = torch.cat(norms).norm()
    return norm
