"""The identity of a model's weights: its tensors, and the config fields that change the function it computes.

A tensor counts by name, dtype, shape and bytes; the tensors are merged in the order of their names. Files, order and metadata
do not count, since they change no log-prob: weights that are saved again or cut into other shards keep their identity. It
costs no more than hashing files: every byte is read once, and as threads hash a tensor each, one large file keeps all
cores busy.

The files are those transformers would load: `model.safetensors`, else those its index names, else all there are.

An adapter is identified by its own tensors and config, and by the weights it was trained on. A folder that holds a model and
an adapter is refused: transformers would add the one to the other without a warning.

Of a config all fields count as they are written, except those in `_NO_FUNCTION`: a field that is written out with its default
gives another identity, since only the model's code knows the defaults. That errs on the safe side: sequences are scored again.
"""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training.contract.errors import ModelError
from training.contract.identity.file_hashing import Tally, hash_in_threads
from training.contract.identity.fingerprint import canonical_json, fingerprint
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.json_objects import read_object, unreadable
from training.contract.identity.safetensors_file import TensorSpan, read_places

_BLOCK_BYTES = 1 << 20
# Bookkeeping of transformers, and dtype, which is chosen on loading.
_NO_FUNCTION = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
# Of an adapter's config: bookkeeping of peft, and settings of its training.
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
PROCESSORS = "*processor_config.json"  # what images and sounds become before a model takes them
_OTHER_FILE = "transformers_weights"  # a field of a config, by which transformers loads another file than these
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as peft calls them


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model, in name order.

    Raises ModelError if there are none, or not all, or an adapter beside them; if they are quantized, or not those that
    transformers would load.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a Hugging Face model folder with config.json")
    if (folder / ADAPTER_CONFIG).exists():
        raise ModelError(
            f"{folder} has an {ADAPTER_CONFIG}; expected a model without an adapter, since transformers would add it "
            f"unasked: merge it into its base model (`merge_and_unload` of peft) and save that, or move it elsewhere"
        )
    if (config := folder / "config.json").is_file():
        _check_config(config)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights at all"
        raise ModelError(f"{folder} has {other}; expected *.safetensors (save the model with `save_pretrained` again)")
    return files


def count_parameters(folder: Path) -> int:
    """The number of parameters in the weights, from the headers of their files. Raises ModelError."""
    return sum(math.prod(tensor.shape) for file in weight_files(folder) for tensor in _places(file))


def weights_identity(folder: Path, cache: HashCache | None = None) -> dict[str, Any]:
    """What the fingerprint is made from: `config`, and of the `weights` sha256, number of tensors and bytes.

    With a `cache`, files that did not change since they were hashed are not read. Raises ModelError.
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
                    f"the tensor {name} is in {owners[name]} and in {file}; remove the one that belongs to other weights"
                )
            digests[name] = digest
    merged = {
        "sha256": fingerprint("tensors", sorted(digests.items())),
        "tensors": len(digests),
        "bytes": sum(table["bytes"] for table in tables),
    }
    return {"config": _function_fields(config), "weights": merged}


def weights_fingerprint(identity: dict[str, Any]) -> str:
    """The fingerprint of `weights_identity`'s answer."""
    return fingerprint("weights", {"config": identity["config"], "tensors": identity["weights"]["sha256"]})


def adapter_fingerprint(folder: Path, base: str) -> str:
    """The fingerprint of the adapter in `folder` on weights of the fingerprint `base`. Raises ModelError."""
    config = read_object(folder / ADAPTER_CONFIG, "an adapter's config")
    [table] = hash_tensors([folder / ADAPTER_WEIGHTS])
    content = {
        "config": {name: value for name, value in config.items() if name not in _NO_ADAPTED_FUNCTION},
        "tensors": fingerprint("tensors", sorted(table["tensors"].items())),
        "base": base,
    }
    return fingerprint("adapter", content)


def hash_tensors(files: Sequence[Path]) -> list[dict[str, Any]]:
    """For each file `tensors`, the sha256 of every tensor by name, and `bytes`, their size. Raises ModelError."""
    work = [(file, tensor) for file in files for tensor in _places(file)]
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(open(file, "rb", buffering=0)).fileno() for file in files}
        digests = hash_in_threads(lambda of, count: _hash_tensor(opened[of[0]], *of, count), work, files)
    tables: dict[Path, dict[str, Any]] = {file: {"tensors": {}, "bytes": 0} for file in files}
    for (file, tensor), digest in zip(work, digests, strict=True):
        tables[file]["tensors"][tensor.name] = digest
        tables[file]["bytes"] += tensor.end - tensor.begin
    return [tables[file] for file in files]


def _hash_tensor(descriptor: int, file: Path, tensor: TensorSpan, count: Tally) -> str:
    digest = hashlib.sha256(canonical_json([tensor.name, tensor.dtype, tensor.shape]))
    at = tensor.begin
    while at < tensor.end:
        block = os.pread(descriptor, min(_BLOCK_BYTES, tensor.end - at), at)
        if not block:
            raise ModelError(
                f"{file} ends at byte {at}, inside the tensor {tensor.name}; it was truncated while it was read"
            )
        digest.update(block)
        count(len(block))
        at += len(block)
    return digest.hexdigest()


def _places(file: Path) -> list[TensorSpan]:
    try:
        return read_places(file)
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise ModelError(
            f"{file} is not a readable safetensors file: {error}; fetch or save the model again"
        ) from error


def _check_config(path: Path) -> None:
    """Raises ModelError where weights are quantized, or others would be loaded than those that are hashed."""
    for part in _objects_in(read_object(path, "a model's config")):
        if quantization := part.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"the weights in {path.parent} are quantized ({method}); expected float32, bfloat16 or float16, since what is "
                f"trained has to be written as it is: use the model's release in bfloat16"
            )
        if _OTHER_FILE in part:
            raise ModelError(
                f"{path} has a field {_OTHER_FILE}, so that other weights would be loaded than these; expected {_SINGLE} or "
                f"{_INDEX} without it: load the model and save it again"
            )


def _objects_in(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config itself and all that it is made of: transformers may load the model of a part alone."""
    yield config
    for part in config.values():
        if isinstance(part, dict):
            yield from _objects_in(part)


def _indexed_files(folder: Path) -> list[Path]:
    names = read_object(folder / _INDEX, "an index of weights").get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{folder / _INDEX} has no weight_map; expected an object, tensor names to file names")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{folder / _INDEX} names {name}, which is no file of that folder; fetch the model again")
    return [folder / name for name in files]


def _function_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Without bookkeeping, also that of the models a composed one holds, such as `text_config`."""
    return {
        name: _function_fields(value) if isinstance(value, dict) and name in _INNER_MODELS else value
        for name, value in config.items()
        if name not in _NO_FUNCTION
    }
