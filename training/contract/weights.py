"""The identity of a model's weights: its safetensors files and the config fields that change the function it computes.

Each file counts by its sha256, merged in name order. Re-saving the same tensors in other shards gives other bytes and so
another identity: deciding that two sets of files hold equal tensors would mean reading headers that a hash of the file
already covers. Names of folders, `transformers_version`, `_name_or_path` and generation defaults change no log-prob and
do not count.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from training.contract.errors import ModelError
from training.contract.fingerprint import fingerprint, hash_file

# Bookkeeping of transformers, and dtype, which is chosen on loading.
_NO_FUNCTION = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures_version"}
_HASHERS = 4


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order. Raises ModelError if there are none."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a Hugging Face model folder with config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights at all"
        raise ModelError(f"{folder} has {other}; expected *.safetensors (save the model with `save_pretrained` again)")
    return files


def function_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json that change the function. Raises ModelError if it is missing or not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as a model's config: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a JSON {type(config).__name__}; expected an object, a model's config")
    return {name: value for name, value in config.items() if name not in _NO_FUNCTION}


def weights_identity(folder: Path) -> dict[str, Any]:
    """What the fingerprint is made of: `config`, and `files` as name -> sha256."""
    files = weight_files(folder)
    with ThreadPoolExecutor(_HASHERS) as pool:
        hashes = list(pool.map(hash_file, files))
    return {"config": function_config(folder), "files": {f.name: h for f, h in zip(files, hashes, strict=True)}}


def weights_fingerprint(identity: dict[str, Any]) -> str:
    """The fingerprint of `weights_identity`'s answer. File names decide the order and nothing else."""
    hashes = [sha for _, sha in sorted(identity["files"].items())]
    return fingerprint("weights", {"config": identity["config"], "files": hashes})
