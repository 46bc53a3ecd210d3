"""Loading and saving causal language models, refusing whatever transformers would only warn about.

A checkpoint with a missing tensor loads with random weights and a warning; a `.bin` file would be unpickled; `auto_map`
runs code from the model's folder. None of these is accepted here.

Nor do the weights stay in their file. By itself transformers maps it privately: where a tensor keeps its dtype, the model
would be trained in that map. Who truncates the file, as `cp` does to what it overwrites, takes even the changed pages away,
and the model goes on with whatever is in the file by then. So the values are read into memory of the model's own, with all
else that is needed of the folder, which is never opened again.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from training.contract.errors import ModelError
from training.contract.identity.model_identity import PROCESSORS, weight_files
from training.contract.identity.safetensors_file import read_places
from training.contract.protocol.input_files import reading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAPS = Path("/proc/self/maps")
_ORIGIN = "_pedigree_origin"


@dataclass(frozen=True)
class WeightsOrigin:
    """What was read with a model's weights: the names of the tensors in its files, and its processors' files."""

    tensors: tuple[str, ...] = ()
    processors: Mapping[str, bytes] = field(default_factory=dict)


def load_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model in `folder`, in evaluation mode; on the meta device without values, and no file of weights is read.

    In bfloat16 some tensors of some architectures stay in float32, as transformers keeps them.

    Raises ModelError for missing or surplus tensors, tensors of another shape, weights that are not whole safetensors
    files, models that need code of their own, and files that change while they are read.
    """
    with reading(folder):
        model = _read_model(folder, dtype, device)
        if device.type != "meta":
            own_values(model, folder)
            setattr(model, _ORIGIN, _read_origin(folder))
    return model.to(device).eval()


def _read_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    weight_files(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if device.type == "meta":
            return without_values(config, DTYPES[dtype])
        with _values_are_read():
            model, info = loader(config).from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    except Exception as error:  # transformers passes on whatever a config or a missing package makes its code raise
        raise ModelError(f"the model in {folder} {_why_not(error)}") from error
    problems = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if found := {name: keys for name, keys in problems.items() if keys}:
        shown = "; ".join(
            f"{name.replace('_', ' ')}: {', '.join(keys[:5])} ({len(keys)})" for name, keys in found.items()
        )
        raise ModelError(f"the weights in {folder} do not fit its config.json: {shown}")
    return model


@contextlib.contextmanager
def _values_are_read() -> Iterator[None]:
    """Within the block transformers reads the values of tensors one by one, and maps no file: one copy is in memory at most.

    It has a setting for this, by which all bytes of a file would be in memory twice.
    """
    opening = modeling_utils.safe_open

    def open_to_read(file: Any, *given: Any, **how: Any) -> Any:
        return opening(file, *given, **{**how, "backend": "pread"})

    modeling_utils.safe_open = open_to_read
    try:
        yield
    finally:
        modeling_utils.safe_open = opening


def own_values(model: PreTrainedModel, folder: Path) -> None:
    """Copy the values of `model` out of the files in `folder`, if any of these is mapped; tied tensors stay tied."""
    maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    files = {str(file.resolve()) for file in weight_files(folder)}
    if files.isdisjoint(line.split(maxsplit=5)[-1] for line in maps):
        return
    for tensor in {id(tensor): tensor for _, tensor in named_tensors(model)}.values():
        tensor.data = tensor.data.clone()


def _read_origin(folder: Path) -> WeightsOrigin:
    names = [place.name for file in weight_files(folder) for place in read_places(file)]
    return WeightsOrigin(tuple(names), {file.name: file.read_bytes() for file in sorted(folder.glob(PROCESSORS))})


def _origin_of(model: PreTrainedModel) -> WeightsOrigin:
    """Nothing for a model that was built from a config, as on most ranks."""
    origin: WeightsOrigin = getattr(model, _ORIGIN, WeightsOrigin())
    return origin


def _why_not(error: Exception) -> str:
    """The message of transformers, without its advice to run the code of a repository."""
    if "trust_remote_code" in str(error):
        return (
            "needs code of its own (`auto_map` in its config.json), which is never run; expected an architecture that "
            "transformers has"
        )
    said = " ".join(str(error).split())
    if unknown := re.match(r"Unrecognized configuration class <class '.*\.(\w+)'>", said):  # and a list of 190 others
        return f"cannot be loaded: transformers has no causal language model for {unknown[1]}; use another base model"
    return f"cannot be loaded: {type(error).__name__}: {said}"


def loader(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads all of the model: of Qwen 3.5, for one, it also has a part without images."""
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    is_whole = whole is not None and whole in (config.architectures or [whole])
    return AutoModelForMultimodalLM if is_whole else AutoModelForCausalLM


def without_values(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that `config` describes, on the meta device, with the dtypes of one that was loaded in `dtype`."""
    with torch.device("meta"):
        model: PreTrainedModel = loader(config).from_config(config, dtype=dtype, trust_remote_code=False)
    kept = [part.replace("*", ".*") for part in model._get_dtype_plan(dtype)]  # in float32, as `from_pretrained` does
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(part, name) for part in kept):
            tensor.data = tensor.data.float()
    return model.eval()


def named_tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Parameters and buffers; tied ones by each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def left_out(model: PreTrainedModel) -> list[str]:
    """The tensors in the files of a loaded model that transformers has no use for, so they are not saved again."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    prefix = f"{model.base_model_prefix}."  # which the names of a published body may lack
    # Below an adapter peft's name of the layer stands between.
    own = {name.removeprefix(prefix).replace(".base_layer.", ".") for name in model.state_dict()}
    others = [name for name in _origin_of(model).tensors if name.removeprefix(prefix) not in own]
    return [name for name in others if any(re.search(pattern, name) for pattern in patterns)]


def save_model(
    model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write `weights` of `dtype`, by default the model's own, as safetensors, with the config of `model`.

    With them goes what a model that takes images or sound needs beside weights and tokenizer. The folder it was loaded from is
    not recorded.
    """
    model.config._name_or_path = ""
    model.save_pretrained(folder, state_dict=weights)
    # Saving wrote `model.dtype`, which for a sharded model is that of its masters.
    model.config.dtype = dtype or model.dtype
    model.config.save_pretrained(folder)
    for name, content in _origin_of(model).processors.items():
        (folder / name).write_bytes(content)
