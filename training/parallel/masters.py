"""A model in training: float32 master weights, their gradients, and the model of the trained precision that runs.

    zero()                    before a step: no gradient yet
    backward(loss, last)      for each micro-batch, the last of this rank's marked
    reduce()                  the gradients are now sums over all ranks
    norm(), clip_()           of the gradient of the whole model
    publish()                 after the optimizer's step: the running model has the new weights

How the ranks share the work is one of two ways, and nobody outside this package asks which: `Replicated`, every rank
holds all weights and the ranks exchange gradients, or `Sharded`, every rank holds a part of each tensor and they exchange
weights as well. Gradients are sums, never means: losses are divided by the count of the global batch before.

Of a model with an adapter only the adapter has masters, and gradients; the rest is frozen.

With precision bfloat16 the model that runs has its masters rounded to bfloat16, just as a reference loaded in bfloat16, so
that both compute the same log-probs before the first step. There is no autocast: it would run the norms and the
residual stream in float32, which the reference does not do.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from training.contract.recipe import Dtype
from training.model.load import DTYPES
from training.parallel.layout import Layout
from training.pieces import Held

_MANTISSA_ROOM = 1e-6
_PIECE = 1 << 16


class Masters(ABC):
    """`model` runs; `parameters` are what the optimizer steps: of each trained tensor what this rank holds, float32.

    `layout` says how the weights lie on the ranks.
    """

    def __init__(
        self, model: PreTrainedModel, parameters: dict[str, Parameter], precision: Dtype, layout: Layout
    ) -> None:
        self.model, self.parameters, self.layout, self.group = model, parameters, layout, layout.group
        self.dtype = DTYPES[precision]

    @property
    def in_lockstep(self) -> bool:
        """Whether every forward and backward pass is an exchange, so that all ranks must run equally many."""
        return self.layout.is_sharded

    @property
    def has_dropout(self) -> bool:
        """Whether the model's config or an adapter asks for any dropout: only then is there a training mode that differs."""
        fields = self.model.config.to_dict().items()
        rates = [value for name, value in fields if "drop" in name and isinstance(value, float)]
        rates += [module.p for module in self.model.modules() if isinstance(module, torch.nn.Dropout)]
        return any(rate > 0 for rate in rates)

    @abstractmethod
    def zero(self) -> None:
        """Forget the gradients of the step before."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`; `last` for this rank's last pass of the step."""

    @abstractmethod
    def reduce(self) -> Tensor:
        """Have each `.grad` be the sum over all ranks; whether this rank's own part of it was finite, as a tensor.

        Every rank calls it once a step, also one that had nothing to run.
        """

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        return norm_of(self._gradients())

    def clip_(self, norm: float, limit: float) -> None:
        """Scale the gradient down to a norm of `limit`, where it is larger."""
        factor = limit / (norm + _MANTISSA_ROOM)
        if factor < 1:
            for gradient in self._gradients():
                gradient.mul_(factor)

    @abstractmethod
    def publish(self) -> None:
        """Let the running model have the weights that `parameters` have now."""

    @abstractmethod
    def held(self, name: str) -> Held:
        """Which rows of the trained tensor `name` this rank holds."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor]:
        """What was trained, whole and as it runs: the model's state, or an adapter's. On rank 0 alone; every rank calls it."""

    def _state(self) -> dict[str, Tensor]:
        """The state of the running model, as this rank has it; where most of it is frozen, of what is trained."""
        state: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        is_adapter = any(not p.requires_grad for p in self.model.parameters())
        return {name: tensor for name, tensor in state.items() if tensor.requires_grad} if is_adapter else state

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """Tensors that hold all of this rank's gradients, and nothing else."""


def norm_of(tensors: list[Tensor]) -> Tensor:
    """One norm of all, from those of small pieces: one float32 sum of millions of squares is 1e-3 off.

    The pieces of a tensor are the rows of a matrix, and what is left over: on a GPU two kernels, not one a piece.
    """
    norms = []
    for flat_N in (tensor.view(-1) for tensor in tensors):
        pieces = len(flat_N) // _PIECE
        norms += [flat_N[: pieces * _PIECE].view(pieces, _PIECE).norm(dim=1), flat_N[pieces * _PIECE :].norm().view(1)]
    norm: Tensor = torch.cat(norms).norm()
    return norm
