"""A model in training: float32 master weights, their gradients, and the model in the trained precision that runs.

    zero()                    before a step: clear the gradients
    backward(loss, last)      for each micro-batch; `last` marks the last one of this rank
    reduce()                  sum the gradients over all ranks
    norm(), clip_()           of the gradient of the whole model
    update_model()            after the optimizer's step: copy the new weights into the running model

There are two implementations, which the rest of the code need not tell apart: `Replicated`, where every rank holds all weights
and gradients are exchanged (as in DDP), and `Sharded`, where every rank holds a part of each tensor and weights are
exchanged too (FSDP). Gradients are sums, never means: losses were divided by the count of the global batch.

With an adapter only the adapter has masters and gradients; the rest of the model is frozen.

With precision bfloat16 the running model is its masters rounded to bfloat16, like a reference loaded in bfloat16, so that both
compute the same log-probs before the first step. There is no autocast: it would run norms and the residual stream in
float32, which the reference does not do.
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
    """`model` runs; `parameters` are what the optimizer steps: float32, of each trained tensor the part of this rank."""

    def __init__(
        self, model: PreTrainedModel, parameters: dict[str, Parameter], trainable: TrainModelSpec, layout: Placement
    ) -> None:
        self.model, self.parameters, self.layout, self.group = model, parameters, layout, layout.group
        self.dtype = DTYPES[trainable.precision]
        self._disable_dropout = trainable.disable_dropout

    def train(self) -> None:
        """Put the running model into the mode in which steps are taken."""
        train_mode(self.model, self.own_dropout)

    @cached_property
    def own_dropout(self) -> bool:
        """Whether the model draws dropout of its own in training: if it is to, and its config has any."""
        if self._disable_dropout:
            return False
        fields = text_config(self.model).to_dict().items()
        return any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields)

    @property
    @abstractmethod
    def turns(self) -> MatrixAssignment | None:
        """How the ranks share whole matrices; None where this one has none to share with. All ranks ask."""

    @abstractmethod
    def zero(self) -> None:
        """Clear the gradients of the step before."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`; `last` for this rank's last pass of the step."""

    @abstractmethod
    def reduce(self) -> Tensor:
        """Make each `.grad` the sum over all ranks; returns, as a tensor, whether this rank's own part was finite.

        Every rank calls it once a step, even if it had nothing to run.
        """

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        return norm_of(self._gradients())

    def clip_(self, norm: float, limit: float) -> None:
        """Scale the gradient down to a norm of `limit`, where it is larger."""
        factor = limit / (norm + _EPSILON)
        if factor < 1:
            torch._foreach_mul_(self._gradients(), factor)

    @abstractmethod
    def update_model(self) -> None:
        """Copy the weights in `parameters` into the running model."""

    @abstractmethod
    def local_rows(self, name: str) -> LocalRows:
        """Which rows of the trained tensor `name` this rank holds."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """The trained weights, whole, in the running precision: the model's, or an adapter's. Rank 0 gets them; all call it."""

    def _state(self) -> dict[str, Tensor]:
        """This rank's part of the running model's state; with an adapter, of the adapter's."""
        state: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return {name: state[name] for name in adapter_parameters(self.model)} or state

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """Tensors that hold all of this rank's gradients, and nothing else."""


def norm_of(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together, from norms of small pieces: one float32 sum of millions of squares is 1e-3 off.

    The pieces of a tensor are the rows of a matrix, and a remainder: on a GPU two kernels, not one a piece.
    """
    norms = []
    for flat_N in (tensor.view(-1) for tensor in tensors):
        pieces = len(flat_N) // _PIECE
        norms += [flat_N[: pieces * _PIECE].view(pieces, _PIECE).norm(dim=1), flat_N[pieces * _PIECE :].norm().view(1)]
    norm: Tensor = torch.cat(norms).norm()
    return norm
