"""Loading and saving causal language models.

We raise errors where transformers is lenient. It fills a missing tensor with random values and a warning, unpickles `.bin`
files, and runs code that `auto_map` names.

Weights are copied out of their file. transformers maps the file privately, and a tensor that keeps its dtype would be
trained in that map. If the file is truncated, as by a `cp` onto it, even modified pages change to the new file's bytes. So
all needed files are read into memory, and the folder is never opened again.
"""

import re
from collections.abc import Mapping
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
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from training.contract.errors import ModelError
from training.contract.identity.model_identity import PROCESSORS, weight_files
from training.contract.identity.safetensors_file import read_places
from training.contract.protocol.input_files import reading
from training.model.transformers_patches import read_without_mapping

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAPS = Path("/proc/self/maps")
_ORIGIN = "_pedigree_origin"


@dataclass(frozen=True)
class WeightsOrigin:
    """The tensor names in a model's weight files, and the contents of its processor files."""

    tensors: tuple[str, ...] = ()
    processors: Mapping[str, bytes] = field(default_factory=dict)


def load_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Return the model in `folder`, in evaluation mode. The meta device gives no values and reads no weight file.

    With bfloat16, transformers keeps some tensors of some architectures in float32.

    Raise ModelError for missing or surplus tensors, wrong shapes, damaged or non-safetensors weights, models with custom
    code, and files that change during the read.
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
        with read_without_mapping():
            model, info = loader(config).from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except Exception as error:  # a bad config or a missing package raises any type in transformers
        raise _load_error(folder, error) from error
    keys_by_problem = {
        problem: sorted(map(str, info[problem])) for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    listed = [
        f"{problem.replace('_', ' ')}: {', '.join(keys[:5])} ({len(keys)})"
        for problem, keys in keys_by_problem.items()
        if keys
    ]
    if listed:
        raise ModelError(f"the weights in {folder} do not fit its config.json: {'; '.join(listed)}", "weights-mismatch")
    return model


def own_values(model: PreTrainedModel, folder: Path) -> None:
    """Copy the values of `model` if a weight file in `folder` is mapped. Tied tensors stay tied."""
    maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    files = {str(file.resolve()) for file in weight_files(folder)}
    if files.isdisjoint(line.split(maxsplit=5)[-1] for line in maps):
        return
    for tensor in {id(tensor): tensor for _, tensor in named_tensors(model)}.values():
        tensor.data = tensor.data.clone()


def _read_origin(folder: Path) -> WeightsOrigin:
    names = [tensor.name for file in weight_files(folder) for tensor in read_places(file)]
    return WeightsOrigin(tuple(names), {file.name: file.read_bytes() for file in sorted(folder.glob(PROCESSORS))})


def _origin_of(model: PreTrainedModel) -> WeightsOrigin:
    """Return the origin; an empty one for a model built from a config, as on most ranks."""
    origin: WeightsOrigin = getattr(model, _ORIGIN, WeightsOrigin())
    return origin


def _load_error(folder: Path, error: Exception) -> ModelError:
    """Return the error, without transformers' advice to run the code of a repository."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"the model in {folder} needs custom code (`auto_map` in its config.json), which is never run; expected an "
            "architecture of transformers: use another base model",
            "custom-code",
        )
    message = " ".join(str(error).split())
    # The rest of this message lists 190 other classes.
    if unknown := re.match(r"Unrecognized configuration class <class '.*\.(\w+)'>", message):
        return ModelError(
            f"the model in {folder} cannot be loaded: transformers lacks a causal language model for {unknown[1]}; use "
            "another base model",
            "unsupported-architecture",
        )
    return ModelError(f"the model in {folder} cannot be loaded: {type(error).__name__}: {message}", "model-load")


def loader(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads all parts: Qwen 3.5, for example, also has a class without images."""
    multimodal = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    has_all_parts = multimodal is not None and multimodal in (config.architectures or [multimodal])
    return AutoModelForMultimodalLM if has_all_parts else AutoModelForCausalLM


def without_values(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `config` on the meta device, with the dtypes of a model loaded in `dtype`."""
    with torch.device("meta"):
        model: PreTrainedModel = loader(config).from_config(config, dtype=dtype, trust_remote_code=False)
    float32_names = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]  # as in `from_pretrained`
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(pattern, name) for pattern in float32_names):
            tensor.data = tensor.data.float()
    return model.eval()


def named_tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers; tied tensors once per name."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def left_out(model: PreTrainedModel) -> list[str]:
    """Return the names of tensors in the model's files that transformers ignores. They are not saved again."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    prefix = f"{model.base_model_prefix}."  # names of a published body may lack it
    # peft inserts `.base_layer.` into the names of adapted layers.
    loaded = {name.removeprefix(prefix).replace(".base_layer.", ".") for name in model.state_dict()}
    unloaded = [name for name in _origin_of(model).tensors if name.removeprefix(prefix) not in loaded]
    return [name for name in unloaded if any(re.search(pattern, name) for pattern in patterns)]


def save_model(
    model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write `weights` as safetensors, with the config of `model` and its processor files for images or sound.

    `weights` and their `dtype` default to the model's. The source folder is not recorded.
    """
    model.config._name_or_path = ""
    model.save_pretrained(folder, state_dict=weights)
    # `save_pretrained` wrote `model.dtype`, for a sharded model the dtype of its master weights.
    model.config.dtype = dtype or model.dtype
    model.config.save_pretrained(folder)
    for name, content in _origin_of(model).processors.items():
        (folder / name).write_bytes(content)
