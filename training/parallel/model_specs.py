"""What a job loads onto its ranks: a model that is to be trained, or one that only runs.

Each knows the folder of its (base) weights, how many bytes a parameter of them takes on a device, how to load itself onto a
device (onto the meta device without values: training.parallel.placement), and, for people, what `work` it is loaded for.

In training a parameter takes 16 bytes: the float32 master, its gradient and two moments of AdamW; two more for a running
copy in bfloat16. Under an adapter, which itself is small, a parameter is frozen and takes only its value, as in a model
that only runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from training.contract.config.recipe import Adapter, Dtype
from training.contract.identity.model_identity import ADAPTER_CONFIG
from training.contract.protocol.job import Input
from training.model.adapter import add_adapter, load_policy
from training.model.backbone import freeze_other_parts
from training.model.load import DTYPES, load_model, named_tensors
from training.parallel.precision import Precision

_TRAINED_BYTES = {"float32": 16, "bfloat16": 18}


@dataclass(frozen=True)
class TrainModelSpec:
    """The model in `folder`, to be trained in `precision`; or a new adapter on it, initialized from `seed`.

    With `disable_dropout` it is trained without the dropout of its config; that of the adapter stays. With `float8_head` the
    head multiplies in 8 bits.
    """

    work: ClassVar[str] = "training"
    folder: Path
    precision: Dtype
    adapter: Adapter | None = None
    seed: int = 0
    disable_dropout: bool = False
    float8_head: bool = False

    @property
    def parameter_bytes(self) -> int:
        return _TRAINED_BYTES[self.precision] if self.adapter is None else int(DTYPES[self.precision].itemsize)

    def load(self, device: torch.device, masters: bool = False) -> PreTrainedModel:
        """As it runs, or with all that is trained in float32, as `masters`. With an adapter the rest is frozen.

        Raises ModelError.
        """
        if self.adapter is None:
            model = load_model(self.folder, "float32" if masters else self.precision, device)
            freeze_other_parts(model)
        else:
            model = load_model(self.folder, self.precision, device)
            add_adapter(model, self.adapter, self.seed, float32=masters)
        return model

    def running_precision(self) -> Precision:
        """The dtypes in which its tensors run: those of a model that was loaded in the trained precision."""
        running = self.load(torch.device("meta"))
        return Precision(DTYPES[self.precision], {name: tensor.dtype for name, tensor in named_tensors(running)})


@dataclass(frozen=True)
class InferenceModelSpec:
    """A model that only runs: `model` itself, or, where that is an adapter, `base` with it."""

    work: ClassVar[str] = "scoring"
    model: Input
    dtype: str
    base: Input | None = None

    @property
    def folder(self) -> Path:
        if self.base is not None and (self.model.folder / ADAPTER_CONFIG).is_file():
            return self.base.folder
        return self.model.folder

    @property
    def parameter_bytes(self) -> int:
        return int(DTYPES[self.dtype].itemsize)

    def load(self, device: torch.device) -> PreTrainedModel:
        """Raises ModelError."""
        return load_policy(self.model, self.base, self.dtype, device).requires_grad_(False)


ModelSource = TrainModelSpec | InferenceModelSpec
