"""Where the files that a recipe names are now, and what identifies them: files are hashed, hub ids resolved to a commit.

`pedigree status` and the like give a cache of hashes, so that unchanged files are not read again. An asset's body, which
records what it sees, gives none.

A data set of the hub is identified by the hashes of its data files there and by the configs in its card, so a commit that
only changes the card's text is no change. A model is identified by its weights wherever they lie, so a model of the hub has
to be downloaded; `peek_base_model` does without.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from assets.inputs.model_ref import ModelRef, base_model_of, tokenizer_of
from assets.inputs.recipe_location import written
from assets.pipeline.pipeline import Pipeline
from model_registry.model_version import Version
from model_registry.registry import Registry
from training.contract.config.data_source import DataSource
from training.contract.config.recipe import Recipe
from training.contract.errors import DataError, ModelError
from training.contract.files.hub import CARD, CARD_FILES, Repository
from training.contract.files.local_files import DataFile, data_files, is_readable
from training.contract.identity.fingerprint import short
from training.contract.identity.hash_cache import HashCache, file_hashes
from training.contract.identity.model_identity import weights_fingerprint, weights_identity
from training.contract.identity.tokenizer_files import (
    CONFIG,
    TOKENIZER_FILES,
    class_fields,
    holds_tokenizer,
    tokenizer_files,
)
from training.contract.system.progress import Emit

_MODEL_FILES = ("*.safetensors", "*config.json", "*.safetensors.index.json")
_OTHER_WEIGHTS = ("*/*", "consolidated*")  # copies of the weights for other programs than transformers
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_HEADER = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)


@dataclass(frozen=True)
class RemoteModel:
    """A model of the hub that is not on this machine: only its id and commit are known."""

    hub: str
    commit: str


@dataclass(frozen=True)
class LocatedModel:
    """A model folder on this machine. `identity`: its config's fields and the sha256 of its tensors.

    `commit`: that of a model of the hub, else None.
    """

    folder: Path
    identity: dict[str, Any]
    commit: str | None = None

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.identity)


@dataclass(frozen=True)
class LocatedTokenizer:
    """A tokenizer folder of this machine and the recipe's template file.

    `identity`: the sha256 of each of its `files` and of the `chat_template`, and the fields of a `config` that pick its class.
    """

    folder: Path
    chat_template: Path | None
    identity: dict[str, Any]


@dataclass(frozen=True)
class LocatedSource:
    """A preference source, ready to be read. `settings`: its fields in the recipe, `revision` resolved to a commit.

    `identity`: name, size and sha256 of each file; of a hub data set, the hub's own hashes. `files`: the local files.
    """

    settings: dict[str, Any]
    identity: Any
    files: list[DataFile]


def locate_base_model(
    pipeline: Pipeline, registry: Registry, emit: Emit | None = None, weights: str | None = None
) -> LocatedModel:
    """The base model's folder and identity. Raises ModelError where it cannot be found or holds no safetensors.

    A model of the hub is downloaded; `emit` hears of it. Where an alias has moved away from the version with the fingerprint
    `weights`, it is that version still.
    """
    named = base_model_of(pipeline.recipe)
    with written(pipeline, named.field):
        if not named.is_of_hub:
            return _local_model(named, registry, weights=weights)
        commit, folder = named.downloaded(_MODEL_FILES, _OTHER_WEIGHTS, emit)
        return LocatedModel(folder, _identity_of_download(named, commit, folder), commit)


def peek_base_model(pipeline: Pipeline, registry: Registry, cache: HashCache) -> LocatedModel | RemoteModel:
    """The base model as far as this machine has it: nothing is downloaded from the hub, no file in the cache is read again.

    A registered model whose files are on a server is fetched, once.
    """
    named = base_model_of(pipeline.recipe)
    with written(pipeline, named.field):
        if not named.is_of_hub:
            return _local_model(named, registry, cache)
        commit = named.commit()
        found = named.repository.cached(commit, _MODEL_FILES, _OTHER_WEIGHTS)
        if found is None:
            return RemoteModel(named.address, commit)
        return LocatedModel(found, _identity_of_download(named, commit, found, cache), commit)


def _local_model(
    named: ModelRef, registry: Registry, cache: HashCache | None = None, weights: str | None = None
) -> LocatedModel:
    if named.is_registered:
        return _released_model(registry.version_at(named.address), registry, cache, weights)
    folder = named.local_folder(registry)
    return LocatedModel(folder, weights_identity(folder, cache))


def locate_champion(
    recipe: Recipe, registry: Registry, cache: HashCache | None = None, weights: str | None = None
) -> LocatedModel | None:
    """The champion of the recipe's own model; None as long as there is none. Raises RegistryError, ModelError.

    Where another version is champion by now, it is the one with the fingerprint `weights` still.
    """
    champion = registry.champion(recipe.release.model_name)
    return None if champion is None else _released_model(champion, registry, cache, weights)


def _released_model(version: Version, registry: Registry, cache: HashCache | None, weights: str | None) -> LocatedModel:
    """The files of `version`, or of another version of that name which was released with `weights`.

    What was begun goes on with the version it was begun with: another recipe's promotion, hours later, would throw it away.
    A download that has rotted is fetched again. Raises ModelError where the files are not what was released.
    """
    if weights not in (None, version.weights):
        version = registry.find_released(version.name, weights) or version
    located = _files_of(version, registry, cache)
    if version.weights not in (None, located.fingerprint) and registry.remove_download(version.download_name):
        located = _files_of(version, registry, cache)
    if version.weights not in (None, located.fingerprint):
        raise ModelError(
            f"version {version.number} of {version.name} leads to {located.folder}, whose weights are "
            f"{short(located.fingerprint)} where {short(version.weights)} were released: run the recipe that released it, "
            "which puts them back, or let the alias point at another version"
        )
    return located


def _files_of(version: Version, registry: Registry, cache: HashCache | None) -> LocatedModel:
    folder = registry.folder(version)
    return LocatedModel(folder, weights_identity(folder, cache))


def locate_tokenizer(pipeline: Pipeline, registry: Registry, cache: HashCache | None = None) -> LocatedTokenizer:
    """The tokenizer's folder and the template file. Raises ModelError or DataError."""
    folder = _tokenizer_folder(pipeline, registry)
    files = tokenizer_files(folder)
    template = pipeline.recipe.tokenization.chat_template
    with written(pipeline, "tokenization.chat_template"):
        if template is not None and not Path(template).is_file():
            absent = "is no regular file" if Path(template).exists() else "does not exist"
            raise DataError(f"{template} {absent}; expected a Jinja file beside the recipe, or null")
    text = Path(template) if template else None
    hashes = dict(zip(files, file_hashes(list(files.values()), cache), strict=True))
    with written(pipeline, tokenizer_of(pipeline.recipe).field):
        config = class_fields(folder)
    identity = {"files": hashes, "chat_template": file_hashes([text], cache)[0] if text else None, "config": config}
    return LocatedTokenizer(folder, text, identity)


def _tokenizer_folder(pipeline: Pipeline, registry: Registry) -> Path:
    named = tokenizer_of(pipeline.recipe)
    with written(pipeline, named.field):
        if named.is_of_hub:
            _, folder = named.downloaded((*TOKENIZER_FILES, CONFIG))
        else:
            folder = named.local_folder(registry)
        if not holds_tokenizer(folder):
            is_own = pipeline.recipe.tokenization.tokenizer is not None
            wanted = "name a tokenizer that has it" if is_own else "name one in `tokenization.tokenizer`"
            raise ModelError(f"{folder} holds no tokenizer; expected tokenizer.json in it: {wanted}")
    return folder


def locate_sources(pipeline: Pipeline, cache: HashCache | None = None) -> list[LocatedSource]:
    """The preference sources. Raises DataError for a path without files, HubError for a data set that cannot be reached."""
    located = []
    for n, source in enumerate(pipeline.recipe.data.sources):
        with written(pipeline, f"data.sources.{n}.{'hub' if source.hub else 'path'}"):
            located.append(_located_source(source, cache))
    return located


def _located_source(source: DataSource, cache: HashCache | None) -> LocatedSource:
    settings = source.model_dump(mode="json")
    if source.path is not None:
        found = data_files(source.path)
        hashes = zip(found, file_hashes([file.path for file in found], cache), strict=True)
        files = [file.model_copy(update={"sha256": sha}) for file, sha in hashes]
        identity = [{"name": f.path.name, "bytes": f.path.stat().st_size, "sha256": f.sha256} for f in files]
        return LocatedSource(settings, identity, files)
    assert source.hub is not None
    commit, contents = _hub_identity(source, Repository(source.hub, "dataset", source.revision))
    return LocatedSource({**settings, "revision": commit}, contents, [])


def _hub_identity(source: DataSource, repository: Repository) -> tuple[str, dict[str, Any]]:
    """The commit, and what of it decides which rows are read: data files by their hash, and how they are divided."""
    commit = repository.commit()
    listed = repository.files(commit)
    counting = {name: blob for name, blob in listed.items() if is_readable(PurePath(name)) or name in CARD_FILES[1:]}
    card = (repository.fetch(commit, [CARD]) / CARD).read_text("utf-8-sig", errors="replace") if CARD in listed else ""
    chosen = {"hub": source.hub, "config": source.config, "split": source.split}
    return commit, {**chosen, "configs": _configs(card), "files": counting}


def _configs(card: str) -> Any:
    """What the card says of configs and splits, in the YAML before its text; that YAML as it is where it cannot be read.

    Or where it has aliases: with them, a few lines can say more than any memory holds.
    """
    header = _HEADER.match(card)
    if header is None:
        return None
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header[1])):
            return header[1]
        said = yaml.safe_load(header[1])
        configs = said.get("configs") if isinstance(said, dict) else None
        return json.loads(json.dumps(configs, default=str, allow_nan=False, ensure_ascii=False).encode())
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return header[1]


def _identity_of_download(named: ModelRef, commit: str, folder: Path, cache: HashCache | None = None) -> dict[str, Any]:
    """The identity of a downloaded model. An error names the weights that the repository has, not the cache's folder."""
    try:
        return weights_identity(folder, cache)
    except ModelError as error:
        found = sorted(name for name in named.repository.files(commit) if name.endswith(_WEIGHT_SUFFIXES))
        raise ModelError(
            f"it cannot be used: {error}; the weights in that repository: {', '.join(found) or 'none'}"
        ) from error
