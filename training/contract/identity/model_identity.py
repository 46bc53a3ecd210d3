"""The identity of a model's weights: its tensors, and the config fields with an effect on its function.

It hashes each tensor's name, dtype, shape and bytes, in the order of names. Files, their order and metadata do not change any
log-prob, so they do not count: weights saved again or in other shards keep their identity. Every byte is read once. Each thread
hashes one tensor at a time, so one large file keeps all cores busy.

As in transformers, the files are `model.safetensors`, else the files of its index, else all *.safetensors.

The identity of an adapter consists of its tensors, its config, and the weights it was trained on. A folder with a model and an
adapter is an error: transformers would merge them without a warning.

All config fields except `_NO_FUNCTION` count as written. A field with its default written out changes the identity: only the
model's code knows the defaults. The only cost is scoring sequences again.
"""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training.contract.config.fields import StrictModel
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import Settings
from training.contract.errors import ModelError
from training.contract.identity.file_hashing import Tally, hash_in_threads
from training.contract.identity.fingerprint import canonical_json, fingerprint
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.json_objects import read_object, unreadable
from training.contract.identity.safetensors_file import TensorSpan, read_places

_BLOCK_BYTES = 1 << 20
# Bookkeeping of transformers, and dtype, because the dtype is chosen on loading.
_NO_FUNCTION = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
# Fields of an adapter's config without an effect on its function: bookkeeping of peft, and training settings.
_NO_ADAPTED_FUNCTION = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "revision",
    "runtime_config",
    "task_type",
}
_INNER_MODELS = {"text_config", "vision_config", "audio_config"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
PROCESSORS = "*processor_config.json"  # the preprocessing of images and sounds
_OTHER_FILE = "transformers_weights"  # a config field; transformers loads the weights file it names
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's names


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model, in name order.

    Raises ModelError if files are missing, quantized or not the files transformers would load, or if there is an adapter.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; expected a Hugging Face model folder with config.json", "no-model-folder"
        )
    if (folder / ADAPTER_CONFIG).exists():
        raise ModelError(
            f"{folder} has an {ADAPTER_CONFIG}; expected a model without an adapter, because transformers would silently "
            f"add it: merge it into its base model (`merge_and_unload` of peft) and save that, or move it elsewhere",
            "adapter-beside-model",
        )
    if (config := folder / "config.json").is_file():
        _check_config(config)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "no weights at all"
        raise ModelError(
            f"{folder} has {other}; expected *.safetensors (save the model with `save_pretrained` again)", "no-weights"
        )
    return files


def count_parameters(folder: Path) -> int:
    """Return the number of parameters, from the headers of the weight files. Raises ModelError."""
    return sum(math.prod(tensor.shape) for file in weight_files(folder) for tensor in _read_spans(file))


class WeightsIdentity(StrictModel):
    """The sha256 over the names and bytes of all tensors, with their number and size."""

    sha256: str
    tensors: int
    bytes: int


class ModelIdentity(Settings):
    """The inputs of a model's fingerprint: the fields of its config that change its function, and its weights."""

    config: JsonObject
    weights: WeightsIdentity

    @property
    def fingerprint(self) -> str:
        return fingerprint("weights", {"config": self.config, "tensors": self.weights.sha256})


def weights_identity(folder: Path, cache: HashCache | None = None) -> ModelIdentity:
    """Return the identity of the model in `folder`.

    With a `cache`, unchanged files are not read. Raises ModelError.
    """
    files = weight_files(folder)
    config = read_object(folder / "config.json", "a model's config")
    tables = cache.digests("tensors", files, hash_tensors) if cache else hash_tensors(files)
    owners: dict[str, Path] = {}
    digests: dict[str, str] = {}
    for file, table in zip(files, tables, strict=True):
        for name, digest in table["tensors"].items():
            if owners.setdefault(name, file) != file:
                raise ModelError(
                    f"the tensor {name} is in {owners[name]} and in {file}; remove the file of the other weights",
                    "duplicate-tensor",
                )
            digests[name] = digest
    weights = WeightsIdentity(
        sha256=fingerprint("tensors", sorted(digests.items())),
        tensors=len(digests),
        bytes=sum(table["bytes"] for table in tables),
    )
    return ModelIdentity(config=_select_function_fields(config), weights=weights)


def adapter_fingerprint(folder: Path, base: str) -> str:
    """Return the fingerprint of the adapter in `folder`, on weights with the fingerprint `base`. Raises ModelError."""
    config = read_object(folder / ADAPTER_CONFIG, "an adapter's config")
    [table] = hash_tensors([folder / ADAPTER_WEIGHTS])
    content = {
        "config": {name: value for name, value in config.items() if name not in _NO_ADAPTED_FUNCTION},
        "tensors": fingerprint("tensors", sorted(table["tensors"].items())),
        "base": base,
    }
    return fingerprint("adapter", content)


def hash_tensors(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return for each file `tensors`, the sha256 by tensor name, and `bytes`, their total size. Raises ModelError."""
    work = [(file, tensor) for file in files for tensor in _read_spans(file)]
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(open(file, "rb", buffering=0)).fileno() for file in files}
        digests = hash_in_threads(lambda item, count: _hash_tensor(opened[item[0]], *item, count), work, files)
    tables: dict[Path, dict[str, Any]] = {file: {"tensors": {}, "bytes": 0} for file in files}
    for (file, tensor), digest in zip(work, digests, strict=True):
        tables[file]["tensors"][tensor.name] = digest
        tables[file]["bytes"] += tensor.end - tensor.begin
    return [tables[file] for file in files]


def _hash_tensor(descriptor: int, file: Path, tensor: TensorSpan, count: Tally) -> str:
    digest = hashlib.sha256(canonical_json([tensor.name, tensor.dtype, tensor.shape]))
    offset = tensor.begin
    while offset < tensor.end:
        block = os.pread(descriptor, min(_BLOCK_BYTES, tensor.end - offset), offset)
        if not block:
            raise ModelError(
                f"{file} ends at byte {offset}, inside the tensor {tensor.name}; it was truncated while it was read: "
                "fetch or save the model again",
                "truncated-file",
            )
        digest.update(block)
        count(len(block))
        offset += len(block)
    return digest.hexdigest()


def _read_spans(file: Path) -> list[TensorSpan]:
    try:
        return read_places(file)
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise ModelError(
            f"{file} is not a readable safetensors file: {error}; fetch or save the model again", "bad-safetensors"
        ) from error


def _check_config(path: Path) -> None:
    """Raise ModelError if the weights are quantized, or transformers would load other weights than the hashed ones."""
    for part in _objects_in(read_object(path, "a model's config")):
        if quantization := part.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"the weights in {path.parent} are quantized ({method}); expected float32, bfloat16 or float16, because "
                f"trained weights cannot be saved quantized: use the model's release in bfloat16",
                "quantized-weights",
            )
        if _OTHER_FILE in part:
            raise ModelError(
                f"{path} has a field {_OTHER_FILE}, so transformers would load other weights; expected {_SINGLE} or "
                f"{_INDEX} without it: load the model and save it again",
                "other-weights-file",
            )


def _objects_in(config: JsonObject) -> Iterator[JsonObject]:
    """Yield the config and all objects in it: transformers may load the model of one part."""
    yield config
    for part in config.values():
        if isinstance(part, dict):
            yield from _objects_in(part)


def _indexed_files(folder: Path) -> list[Path]:
    names = read_object(folder / _INDEX, "an index of weights").get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(
            f"{folder / _INDEX} lacks a weight_map; expected an object, tensor names to file names: fetch the model again",
            "bad-weight-index",
        )
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(
                f"{folder / _INDEX} names {name}, but that file is missing; fetch the model again",
                "missing-weights-file",
            )
    return [folder / name for name in files]


def _select_function_fields(config: JsonObject) -> JsonObject:
    """Return the config without bookkeeping, also in inner configs such as `text_config`."""
    return {
        name: _select_function_fields(value) if isinstance(value, dict) and name in _INNER_MODELS else value
        for name, value in config.items()
        if name not in _NO_FUNCTION
    }
