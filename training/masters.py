"""A model in training: float32 master weights, one gradient buffer, and the copy of lower precision that runs.

With precision float32 the model's parameters are the masters. With bfloat16 the model that runs is a bfloat16 copy,
loaded just as a bfloat16 reference is, so that both compute the same log-probs before the first step; gradients of each
micro-batch are added to the float32 buffer, and after an optimizer step the masters are rounded into the copy.
There is no autocast: it would run the norms and the residual stream in float32, which the reference does not do.

Of a model with an adapter only the adapter has masters, and gradients; the rest is frozen and there once.

All gradients lie in one flat float32 tensor, and each master's `.grad` is a view of it. So the exchange among ranks is
one sum, the norm is one norm, and clipping one product. It is why torch's DistributedDataParallel is not used: that
reduces inside the last backward pass, and a rank without a pair in this step has none. What is lost is the overlap of
the exchange with that one backward pass.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from training.contract.recipe import Adapter, Dtype
from training.model.adapter import add_adapter
from training.model.load import load_model

_MANTISSA_ROOM = 1e-6
_PIECE = 1 << 16


class Masters:
    """`model` runs, `parameters` are what the optimizer steps, `gradient_N` holds all their gradients in a row.

    With an `adapter` it is a new one, which follows from `seed`, that is trained.
    """

    def __init__(
        self, folder: Path, precision: Dtype, device: torch.device, adapter: Adapter | None = None, seed: int = 0
    ) -> None:
        self.model: PreTrainedModel = load_model(folder, precision, device)
        if adapter is not None:
            add_adapter(self.model, adapter, seed)
        self._copied = precision != "float32"
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self._copied and adapter is None:
            trained = dict(load_model(folder, "float32", device).named_parameters())
        elif self._copied:  # it was made in this precision: there are no more digits to be had
            trained = {name: Parameter(running.detach().float()) for name, running in trained.items()}
        self.parameters: dict[str, Parameter] = trained
        total = sum(p.numel() for p in self.parameters.values())
        self.gradient_N = torch.zeros(total, dtype=torch.float32, device=device)
        self._attach_gradients()

    @property
    def has_dropout(self) -> bool:
        """Whether the model's config or the adapter asks for any dropout: only then is there a training mode that differs."""
        fields = self.model.config.to_dict().items()
        layers = (module for module in self.model.modules() if isinstance(module, torch.nn.Dropout))
        return any("drop" in name and isinstance(value, float) and value > 0 for name, value in fields) or any(
            layer.p > 0 for layer in layers
        )

    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient, from those of its pieces: one float32 sum of millions of squares is 1e-3 off."""
        norm: Tensor = torch.nn.utils.get_total_norm(self.gradient_N.split(_PIECE))
        return norm

    def clip_(self, norm: Tensor, limit: float) -> None:
        """Scale the gradient down to a norm of `limit`, where it is larger."""
        self.gradient_N.mul_((limit / (norm + _MANTISSA_ROOM)).clamp(max=1.0))

    def publish(self) -> None:
        """Round the masters into the running copy, where there is one."""
        if self._copied:
            with torch.no_grad():
                for name, master in self.parameters.items():
                    self.model.get_parameter(name).copy_(master)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take the weights of a checkpoint."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        self.publish()

    def _attach_gradients(self) -> None:
        parts = self.gradient_N.split([p.numel() for p in self.parameters.values()])
        for (name, master), part in zip(self.parameters.items(), parts, strict=True):
            master.grad = part.view_as(master)
            if self._copied:
                self.model.get_parameter(name).register_post_accumulate_grad_hook(_add_to(master.grad))


def _add_to(total: Tensor) -> Callable[[Tensor], None]:
    def hook(running: Tensor) -> None:
        assert running.grad is not None
        total.add_(running.grad)
        running.grad = None

    return hook
