"""The dtypes in which the tensors of a model run. Their master weights are float32.

Master weights are never rounded. Rounded are the running copy of all weights, or with shards the weights that FSDP gathers. So
the model computes the same as one loaded in the trained precision. With bfloat16, transformers keeps some tensors of some
architectures in float32, for example routers of experts. FSDP gathers the weights of a module in one dtype, so modules with
such weights are gathered separately. FSDP does not cast the inputs of modules either: some architectures have, for example,
float32 rotary positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module
from transformers import PreTrainedModel

from training.contract.errors import ModelError
from training.model.load import named_tensors


@dataclass(frozen=True)
class Precision:
    """The dtype of each tensor by name, and the `usual` one. By default tensors keep their dtypes."""

    usual: torch.dtype | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def policy(self, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """Return FSDP's policy for weights that run in `dtype`. Gradients are summed in float32."""
        reduce_dtype = None if self.usual is None else torch.float32
        return MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)

    def modules_apart(self, model: PreTrainedModel) -> dict[Module, torch.dtype]:
        """Return the modules with weights of an unusual dtype. Raise ModelError for a module with several dtypes."""
        dtypes = {name: self.dtypes[name] for name, _ in model.named_parameters() if name in self.dtypes}
        separate = {name.rpartition(".")[0]: dtype for name, dtype in dtypes.items() if dtype != self.usual}
        for owner, dtype in separate.items():
            present = {other for name, other in dtypes.items() if name.startswith(f"{owner}.")}
            if present != {dtype}:
                raise ModelError(
                    f"{owner} of {type(model).__name__} has weights of {' and '.join(sorted(map(str, present)))}; FSDP "
                    "cannot gather them together: set `compute.parallel: ddp`, or `precision: float32`",
                    "mixed-dtypes",
                )
        return {model.get_submodule(owner): dtype for owner, dtype in separate.items()}

    def round_(self, model: PreTrainedModel) -> None:
        """Cast the tensors of a full model from float32 to their running dtypes."""
        for name, tensor in named_tensors(model):
            tensor.data = tensor.data.to(self.dtypes[name])

    def cast_buffers(self, model: PreTrainedModel) -> None:
        """Cast buffers to their running dtypes. They lack master copies."""
        for name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(self.dtypes.get(name, buffer.dtype))


AS_LOADED = Precision()
