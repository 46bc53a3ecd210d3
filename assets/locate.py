"""Where the things a recipe names are now, and what identifies them: files are hashed, hub ids resolved to a commit.

Whoever asks sees the world as it is at that moment. Only hashes of files that nobody wrote since are remembered, and only
for those who look: a body, which records what it sees, gives no cache.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download

from model_registry.registry import Registry
from training.contract.errors import DataError, ModelError
from training.contract.files import TOKENIZER_FILES, DataFile, data_files, tokenizer_files
from training.contract.fingerprint import fingerprint, hash_files
from training.contract.hash_cache import HashCache
from training.contract.recipe import DataSource, Recipe
from training.contract.weights import weights_fingerprint, weights_identity

_MODEL_FILES = ["*.safetensors", "config.json", "generation_config.json", "*.safetensors.index.json"]


@dataclass(frozen=True)
class LocatedModel:
    """A model folder of this machine. `identity`: its config's fields and the sha256 of its tensors."""

    folder: Path
    identity: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.identity)


@dataclass(frozen=True)
class LocatedTokenizer:
    """A tokenizer folder of this machine and the recipe's template file. `identity`: the sha256 of each file."""

    folder: Path
    chat_template: Path | None
    identity: dict[str, Any]


@dataclass(frozen=True)
class LocatedData:
    """The preference sources, ready to be read. `identity`: for files their sha256 in order, for the hub the commit.

    `files`: the local files of each source, in that order, with their sha256; none for one of the hub.
    """

    sources: list[dict[str, Any]]
    identity: list[Any]
    files: list[list[DataFile]]

    @property
    def fingerprint(self) -> str:
        """File names give the order and nothing else: a renamed or moved file is the same data."""
        return fingerprint(
            "preference_source", [[f["sha256"] for f in s] if isinstance(s, list) else s for s in self.identity]
        )


def locate_base_model(recipe: Recipe, registry: Registry, cache: HashCache | None = None) -> LocatedModel:
    """The base model's folder and identity. Raises ModelError where it cannot be found or holds no safetensors."""
    reference = recipe.reference
    folder = _model_folder("reference.model", reference.model, reference.revision, _MODEL_FILES, registry)
    return LocatedModel(folder, weights_identity(folder, cache))


def locate_champion(recipe: Recipe, registry: Registry, cache: HashCache | None = None) -> LocatedModel | None:
    """The champion of the recipe's own model; None as long as there is none. Raises RegistryError, ModelError."""
    name = recipe.release.model_name
    if registry.champion(name) is None:
        return None
    folder = registry.resolve(f"models:/{name}@champion")
    return LocatedModel(folder, weights_identity(folder, cache))


def locate_tokenizer(recipe: Recipe, registry: Registry, cache: HashCache | None = None) -> LocatedTokenizer:
    """The tokenizer's folder and the template file. Raises ModelError or DataError that names the recipe's field."""
    field, address, revision = "tokenization.tokenizer", recipe.tokenization.tokenizer, None
    if address is None:
        field, address, revision = "reference.model", recipe.reference.model, recipe.reference.revision
    folder = _model_folder(field, address, revision, list(TOKENIZER_FILES), registry)
    files = tokenizer_files(folder)
    if not files:
        raise ModelError(f"{folder} holds no tokenizer; expected tokenizer.json (set `tokenization.tokenizer`)")
    template = recipe.tokenization.chat_template
    if template is not None and not Path(template).is_file():
        raise DataError(f"there is no file {template}; `tokenization.chat_template` names a Jinja file or is null")
    text = Path(template) if template else None
    hashes = dict(zip(files, _hashed(list(files.values()), cache), strict=True))
    identity = {"files": hashes, "chat_template": _hashed([text], cache)[0] if text else None}
    return LocatedTokenizer(folder, text, identity)


def locate_data(recipe: Recipe, cache: HashCache | None = None) -> LocatedData:
    """The preference sources. Raises DataError for a path without files and a hub data set that cannot be reached."""
    located = [_locate_source(source, cache) for source in recipe.data.sources]
    return LocatedData(
        [described for described, _, _ in located],
        [identity for _, identity, _ in located],
        [files for _, _, files in located],
    )


def _locate_source(source: DataSource, cache: HashCache | None) -> tuple[dict[str, Any], Any, list[DataFile]]:
    described = source.model_dump(mode="json")
    if source.path is not None:
        found = data_files(source.path)
        hashes = zip(found, _hashed([file.path for file in found], cache), strict=True)
        files = [file.model_copy(update={"sha256": sha}) for file, sha in hashes]
        identity = [{"name": f.path.name, "bytes": f.path.stat().st_size, "sha256": f.sha256} for f in files]
        return described, identity, files
    assert source.hub is not None
    try:
        commit = HfApi().dataset_info(source.hub, revision=source.revision).sha
    except Exception as error:  # whatever the hub's client raises, its text is the cause
        raise DataError(
            f"the data set {source.hub!r} (revision {source.revision or 'main'}) cannot be reached: {error}; "
            f"look at `data.sources` and at the network; a private one needs HF_TOKEN"
        ) from error
    pinned = {"hub": source.hub, "config": source.config, "split": source.split, "commit": commit}
    return {**described, "revision": commit}, pinned, []


def _hashed(files: list[Path], cache: HashCache | None) -> list[str]:
    """The sha256 of each file, remembered ones included if there is a `cache`."""
    return cache.digests("bytes", files, hash_files) if cache else hash_files(files)


def _model_folder(field: str, address: str, revision: str | None, patterns: list[str], registry: Registry) -> Path:
    if address.startswith("models:/"):
        return registry.resolve(address)
    if Path(address).is_absolute():
        if not Path(address).is_dir():
            raise ModelError(f"there is no folder {address}; `{field}` is a folder beside the recipe, or a hub id")
        return Path(address)
    try:
        return Path(snapshot_download(address, revision=revision, allow_patterns=patterns))
    except Exception as error:  # whatever the hub's client raises, its text is the cause
        raise ModelError(
            f"`{field}: {address}` is neither a folder beside the recipe nor a model of the hub that can be reached: "
            f"{error}; a private one needs HF_TOKEN"
        ) from error
