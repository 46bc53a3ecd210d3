"""In which dtype the tensors of a model run, while their masters are float32.

Masters are never rounded, only what runs: a copy of all weights where a rank holds them whole, what FSDP gathers where it
holds shards. So the model computes what it would if it had been loaded in the trained precision. A model in bfloat16 is not all
bfloat16, though: transformers keeps a few tensors of some architectures in float32, routers of experts for example. FSDP
gathers the weights of a module in one dtype, so the modules that own such weights are gathered by themselves. For the same
reason it leaves what goes into a module as it is: rotary positions, for one, are float32 in some architectures.
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
    """The dtype of each tensor by name, `usual` for most; by default as they are."""

    usual: torch.dtype | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def policy(self, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """For weights that run in `dtype`; their gradients are summed in float32."""
        summed_in = None if self.usual is None else torch.float32
        return MixedPrecisionPolicy(dtype, summed_in, cast_forward_inputs=False)

    def modules_apart(self, model: PreTrainedModel) -> dict[Module, torch.dtype]:
        """The modules whose weights run in an unusual dtype. Raises ModelError for one that has others as well."""
        dtypes = {name: self.dtypes[name] for name, _ in model.named_parameters() if name in self.dtypes}
        apart = {name.rpartition(".")[0]: dtype for name, dtype in dtypes.items() if dtype != self.usual}
        for owner, dtype in apart.items():
            found = {of for name, of in dtypes.items() if name.startswith(f"{owner}.")}
            if found != {dtype}:
                raise ModelError(
                    f"{owner} of {type(model).__name__} has weights of {' and '.join(sorted(map(str, found)))}, which cannot "
                    f"be gathered together: set `compute.parallel: ddp`, or `precision: float32`"
                )
        return {model.get_submodule(owner): dtype for owner, dtype in apart.items()}

    def round_(self, model: PreTrainedModel) -> None:
        """Give the tensors of a whole model of masters the dtypes in which they run."""
        for name, tensor in named_tensors(model):
            tensor.data = tensor.data.to(self.dtypes[name])

    def cast_buffers(self, model: PreTrainedModel) -> None:
        """Buffers have no masters: they are kept as they run."""
        for name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(self.dtypes.get(name, buffer.dtype))


AS_LOADED = Precision()
