"""What of the base model's folder is released beside the weights, or decides where the released model stops."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assets.inputs.model_ref import base_model_of
from assets.inputs.recipe_location import written
from assets.inputs.resolve import RemoteModel
from assets.pipeline.pipeline import Pipeline
from model_registry.registry import Registry
from training.contract.identity.hash_cache import HashCache, file_hashes
from training.contract.identity.model_identity import PROCESSORS
from training.contract.identity.stop_tokens import eos_token_ids, generation_settings
from training.contract.identity.tokenizer_files import class_fields

_CONFIGS, _OF_OTHERS = ("*config.json",), ("*/*",)  # of the hub these alone are fetched, and no weights


@dataclass(frozen=True)
class LocatedShippedFiles:
    """A base model's folder. `identity`: what is shipped of it, or decides how that is loaded.

    `base_generation`: how it generates; `eos_token_ids`: at which it stops; `processors`: the sha256 of
    each processor file; `config`: the fields of its config.json that pick a tokenizer's class.
    """

    folder: Path
    identity: dict[str, Any]


def locate_shipping(
    pipeline: Pipeline, registry: Registry, cache: HashCache | None = None
) -> LocatedShippedFiles | RemoteModel:
    """Look at the base model's folder, without its weights. Raises ModelError, HubError or RegistryError.

    With a `cache`, files in it are not read again, and nothing is downloaded from the hub.
    """
    named = base_model_of(pipeline.recipe)
    with written(pipeline, named.field):
        if not named.is_of_hub:
            folder = named.local_folder(registry)
        elif cache is None:
            _, folder = named.downloaded(_CONFIGS, _OF_OTHERS)
        else:
            commit = named.commit()
            found = named.repository.cached(commit, _CONFIGS, _OF_OTHERS)
            if found is None:
                return RemoteModel(named.address, commit)
            folder = found
        return LocatedShippedFiles(folder, _identity(folder, cache))


def _identity(folder: Path, cache: HashCache | None) -> dict[str, Any]:
    processors = sorted(folder.glob(PROCESSORS))
    hashes = zip(processors, file_hashes(processors, cache), strict=True)
    generation = generation_settings(folder)
    return {
        "base_generation": generation,
        "eos_token_ids": eos_token_ids(generation),
        "processors": {path.name: sha256 for path, sha256 in hashes},
        "base_config": class_fields(folder),
    }
