"""What a job puts on its ranks: a model that is to be trained, or one that is only run.

Each knows the folder that holds most of its weights, how many bytes of a device a parameter of them takes, and how to load
itself onto a device; onto the meta device without a number (training.parallel.layout).

In training a parameter takes 16 bytes: the float32 master, its gradient and two moments of AdamW; two more for a running
copy in bfloat16. Beside an adapter, which itself is small, a parameter is frozen and takes no more than its value, as in
a model that is only run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from transformers import PreTrainedModel

from training.contract.job import Input
from training.contract.recipe import Adapter, Dtype
from training.contract.weights import ADAPTER_CONFIG
from training.model.adapter import add_adapter, load_policy
from training.model.load import load_model

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}
_TRAINED_BYTES = {"float32": 16, "bfloat16": 18}


class ModelSource(Protocol):
    """`work` says what is done with the model."""

    work: ClassVar[str]

    @property
    def folder(self) -> Path:
        """The weights that count."""

    @property
    def parameter_bytes(self) -> int:
        """The memory of a device that a parameter takes where all of them are on each rank."""


@dataclass(frozen=True)
class TrainableModel:
    """What is to be trained, in which precision: the model in `folder`, or a new adapter to it, which follows from `seed`."""

    work: ClassVar[str] = "training"
    folder: Path
    precision: Dtype
    adapter: Adapter | None = None
    seed: int = 0

    @property
    def parameter_bytes(self) -> int:
        return (_TRAINED_BYTES if self.adapter is None else _VALUE_BYTES)[self.precision]

    def load(self, dtype: Dtype, device: torch.device) -> PreTrainedModel:
        """The model that runs. With an adapter all of it is frozen but that. Raises ModelError."""
        model = load_model(self.folder, dtype, device)
        if self.adapter is not None:
            add_adapter(model, self.adapter, self.seed)
        return model


@dataclass(frozen=True)
class FrozenModel:
    """A model that is only run: `model` by itself, or the adapter it is on `base`, the model it was trained from."""

    work: ClassVar[str] = "scoring"
    model: Input
    dtype: str
    base: Input | None = None

    @property
    def folder(self) -> Path:
        is_adapter = self.base is not None and (self.model.folder / ADAPTER_CONFIG).is_file()
        return self.base.folder if self.base is not None and is_adapter else self.model.folder

    @property
    def parameter_bytes(self) -> int:
        return _VALUE_BYTES[self.dtype]

    def load(self, device: torch.device) -> PreTrainedModel:
        """Raises ModelError."""
        return load_policy(self.model, self.base, self.dtype, device).requires_grad_(False)
