"""Files of the base model for a release: those copied beside the weights, and those with its end-of-sequence tokens."""

from dataclasses import dataclass
from pathlib import Path

from assets.inputs.model_ref import base_model_of
from assets.inputs.recipe_location import written
from assets.pipeline.pipeline import Pipeline
from model_registry.registry import Registry
from training.contract.identity.hash_cache import HashCache, file_hashes
from training.contract.identity.model_identity import PROCESSORS
from training.contract.identity.stop_tokens import eos_token_ids, generation_settings
from training.contract.identity.tokenizer_files import class_fields
from training.contract.protocol.settings import RemoteModel, ShippedIdentity

_FETCHED, _IGNORED = ("*config.json",), ("*/*",)  # from the hub only these files are fetched, without weights


@dataclass(frozen=True)
class LocatedShippedFiles:
    """A base model's folder and the identity of its shipped files."""

    folder: Path
    identity: ShippedIdentity


def locate_shipping(
    pipeline: Pipeline, registry: Registry, cache: HashCache | None = None
) -> LocatedShippedFiles | RemoteModel:
    """Resolve the base model's folder, without its weights. Raise ModelError, HubError or RegistryError.

    With a `cache`, files in it are not read again, and nothing is downloaded from the hub.
    """
    ref = base_model_of(pipeline.recipe)
    with written(pipeline, ref.field):
        if not ref.is_of_hub:
            folder = ref.local_folder(registry)
        elif cache is None:
            _, folder = ref.download(_FETCHED, _IGNORED)
        else:
            commit = ref.commit()
            cached = ref.repository.cached(commit, _FETCHED, _IGNORED)
            if cached is None:
                return RemoteModel(hub=ref.address, commit=commit)
            folder = cached
        return LocatedShippedFiles(folder, _identity(folder, cache))


def _identity(folder: Path, cache: HashCache | None) -> ShippedIdentity:
    processors = sorted(folder.glob(PROCESSORS))
    hashes = zip(processors, file_hashes(processors, cache), strict=True)
    generation = generation_settings(folder)
    return ShippedIdentity(
        base_generation=generation,
        eos_token_ids=tuple(eos_token_ids(generation)),
        processors={path.name: sha256 for path, sha256 in hashes},
        base_config=class_fields(folder),
    )
