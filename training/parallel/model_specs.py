"""The models that a job loads onto its ranks: one to train, or one that only scores.

A spec has the folder of its (base) weights, the bytes per parameter on a device, a `load` method (onto the meta device without
values: training.parallel.placement), and a name of its `work` for messages.

In training a parameter takes 16 bytes: the float32 master weight, its gradient and two moments of AdamW. A running copy in
bfloat16 takes two more. Below an adapter a parameter is frozen and takes only its value, as in scoring; the adapter is small.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from training.contract.config.fields import Dtype
from training.contract.config.training import Adapter
from training.contract.identity.model_identity import ADAPTER_CONFIG
from training.contract.protocol.job import Input
from training.model.adapter import add_adapter, load_policy
from training.model.backbone import freeze_other_parts
from training.model.load import DTYPES, load_model, named_tensors
from training.parallel.precision import Precision

_TRAINED_BYTES = {"float32": 16, "bfloat16": 18}


@dataclass(frozen=True)
class TrainModelSpec:
    """The model in `folder` to train in `precision`, or a new adapter on it, initialized from `seed`.

    `disable_dropout` turns off the dropout of the config, but not of the adapter. `float8_head`: the head multiplies in 8 bits.
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

    def load(self, device: torch.device, master_weights: bool = False) -> PreTrainedModel:
        """Return the model in the running precision; with `master_weights` its trained tensors are float32. Raise ModelError.

        With an adapter the other parameters are frozen.
        """
        if self.adapter is None:
            model = load_model(self.folder, "float32" if master_weights else self.precision, device)
            freeze_other_parts(model)
        else:
            model = load_model(self.folder, self.precision, device)
            add_adapter(model, self.adapter, self.seed, float32=master_weights)
        return model

    def running_precision(self) -> Precision:
        """Return the dtypes of a model loaded in the trained precision."""
        running = self.load(torch.device("meta"))
        return Precision(DTYPES[self.precision], {name: tensor.dtype for name, tensor in named_tensors(running)})


@dataclass(frozen=True)
class InferenceModelSpec:
    """A model that only scores: `model`, or `base` with the adapter `model`."""

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
        """Return the frozen model. Raise ModelError."""
        return load_policy(self.model, self.base, self.dtype, device).requires_grad_(False)


ModelSource = TrainModelSpec | InferenceModelSpec
