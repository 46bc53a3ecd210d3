"""Location and identity of a recipe's files: files are hashed, and hub ids are resolved to a commit.

`pedigree status` and similar commands pass a cache of hashes, so that unchanged files are not read again. An asset's body
passes no cache, because it records the identity.

A data set of the hub is identified by the hub's hashes of its data files and by the configs in its card. A change of the card's
text alone does not count. A model is identified by its weights, so a model of the hub must be downloaded; `peek_base_model`
does not download.
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
from training.contract.config.json_object import JsonObject
from training.contract.config.recipe import Recipe
from training.contract.errors import DataError, ModelError, without_code
from training.contract.files.hub import CARD, CARD_FILES, Repository
from training.contract.files.local_files import DataFile, data_files, is_readable
from training.contract.identity.fingerprint import short
from training.contract.identity.hash_cache import HashCache, file_hashes
from training.contract.identity.model_identity import ModelIdentity, weights_identity
from training.contract.identity.tokenizer_files import (
    CONFIG,
    TOKENIZER_FILES,
    class_fields,
    holds_tokenizer,
    tokenizer_files,
)
from training.contract.protocol.settings import RemoteModel, TokenizerIdentity
from training.contract.system.progress import Emit

_MODEL_FILES = ("*.safetensors", "*config.json", "*.safetensors.index.json")
_OTHER_WEIGHTS = ("*/*", "consolidated*")  # copies of the weights for other programs than transformers
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_HEADER = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)


@dataclass(frozen=True)
class LocatedModel:
    """A model folder on this machine. `commit`: the commit on the hub, or None."""

    folder: Path
    identity: ModelIdentity
    commit: str | None = None

    @property
    def fingerprint(self) -> str:
        return self.identity.fingerprint


@dataclass(frozen=True)
class LocatedTokenizer:
    """A tokenizer folder on this machine and the recipe's template file."""

    folder: Path
    chat_template: Path | None
    identity: TokenizerIdentity


@dataclass(frozen=True)
class LocatedSource:
    """A preference source, ready to be read.

    `settings`: its fields in the recipe, with `revision` resolved to a commit. `identity`: name, size and sha256 of each file,
    or the hub's hashes for a data set of the hub. `files`: the local files.
    """

    settings: DataSource
    identity: Any
    files: list[DataFile]


def locate_base_model(
    pipeline: Pipeline, registry: Registry, emit: Emit | None = None, weights: str | None = None
) -> LocatedModel:
    """Return the base model's folder and identity. Raise ModelError if it is missing or has no safetensors.

    Download a model of the hub, with progress to `emit`. With the fingerprint `weights`, return the registered version with
    these weights, even if the alias has moved to another version.
    """
    ref = base_model_of(pipeline.recipe)
    with written(pipeline, ref.field):
        if not ref.is_of_hub:
            return _local_model(ref, registry, weights=weights)
        commit, folder = ref.download(_MODEL_FILES, _OTHER_WEIGHTS, emit)
        return LocatedModel(folder, _identity_of_download(ref, commit, folder), commit)


def peek_base_model(pipeline: Pipeline, registry: Registry, cache: HashCache) -> LocatedModel | RemoteModel:
    """Return the base model without downloading from the hub or reading files in the cache again.

    A registered model on a server is fetched once.
    """
    ref = base_model_of(pipeline.recipe)
    with written(pipeline, ref.field):
        if not ref.is_of_hub:
            return _local_model(ref, registry, cache)
        commit = ref.commit()
        folder = ref.repository.cached(commit, _MODEL_FILES, _OTHER_WEIGHTS)
        if folder is None:
            return RemoteModel(hub=ref.address, commit=commit)
        return LocatedModel(folder, _identity_of_download(ref, commit, folder, cache), commit)


def _local_model(
    ref: ModelRef, registry: Registry, cache: HashCache | None = None, weights: str | None = None
) -> LocatedModel:
    if ref.is_registered:
        return _released_model(registry.version_at(ref.address), registry, cache, weights)
    folder = ref.local_folder(registry)
    return LocatedModel(folder, weights_identity(folder, cache))


def locate_champion(
    recipe: Recipe, registry: Registry, cache: HashCache | None = None, weights: str | None = None
) -> LocatedModel | None:
    """Return the champion of the recipe's model, or None. Raise RegistryError or ModelError.

    With the fingerprint `weights`, return the version with these weights, even if another one has become champion.
    """
    champion = registry.champion(recipe.release.model_name)
    return None if champion is None else _released_model(champion, registry, cache, weights)


def _released_model(version: Version, registry: Registry, cache: HashCache | None, weights: str | None) -> LocatedModel:
    """Return the files of `version`, or of the version of the same model with `weights`.

    Work in progress continues with its first version: another recipe's promotion, hours later, must not discard it. A corrupt
    download is fetched again. Raise ModelError if the files differ from the released ones.
    """
    if weights not in (None, version.weights):
        version = registry.find_released(version.name, weights) or version
    located = _locate_version(version, registry, cache)
    if version.weights not in (None, located.fingerprint) and registry.remove_download(version.download_name):
        located = _locate_version(version, registry, cache)
    if version.weights not in (None, located.fingerprint):
        raise ModelError(
            f"the files of version {version.number} of {version.name} in {located.folder} have the weights "
            f"{short(located.fingerprint)}, expected {short(version.weights)} as released: run the recipe that released the "
            "version to restore them, or move the alias to another version",
            "version-files-differ",
        )
    return located


def _locate_version(version: Version, registry: Registry, cache: HashCache | None) -> LocatedModel:
    folder = registry.folder(version)
    return LocatedModel(folder, weights_identity(folder, cache))


def locate_tokenizer(pipeline: Pipeline, registry: Registry, cache: HashCache | None = None) -> LocatedTokenizer:
    """Return the tokenizer's folder and the template file. Raise ModelError or DataError."""
    folder = _tokenizer_folder(pipeline, registry)
    files = tokenizer_files(folder)
    template = pipeline.recipe.tokenization.chat_template
    with written(pipeline, "tokenization.chat_template"):
        if template is not None and not Path(template).is_file():
            problem = "is not a regular file" if Path(template).exists() else "does not exist"
            raise DataError(
                f"{template} {problem}; expected a Jinja file beside the recipe, or null", "no-template-file"
            )
    text = Path(template) if template else None
    hashes = dict(zip(files, file_hashes(list(files.values()), cache), strict=True))
    with written(pipeline, tokenizer_of(pipeline.recipe).field):
        config = class_fields(folder)
    of_template = file_hashes([text], cache)[0] if text else None
    return LocatedTokenizer(folder, text, TokenizerIdentity(files=hashes, chat_template=of_template, config=config))


def _tokenizer_folder(pipeline: Pipeline, registry: Registry) -> Path:
    ref = tokenizer_of(pipeline.recipe)
    with written(pipeline, ref.field):
        if ref.is_of_hub:
            _, folder = ref.download((*TOKENIZER_FILES, CONFIG))
        else:
            folder = ref.local_folder(registry)
        if not holds_tokenizer(folder):
            has_field = pipeline.recipe.tokenization.tokenizer is not None
            remedy = "name another tokenizer" if has_field else "name one in `tokenization.tokenizer`"
            raise ModelError(f"{folder} holds no tokenizer; expected tokenizer.json in it: {remedy}", "no-tokenizer")
    return folder


def locate_sources(pipeline: Pipeline, cache: HashCache | None = None) -> list[LocatedSource]:
    """Return the preference sources. Raise DataError for a path without files, HubError for an unavailable data set."""
    located = []
    for n, source in enumerate(pipeline.recipe.data.sources):
        with written(pipeline, f"data.sources.{n}.{'hub' if source.hub else 'path'}"):
            located.append(_locate_source(source, cache))
    return located


def _locate_source(source: DataSource, cache: HashCache | None) -> LocatedSource:
    if source.path is not None:
        matches = data_files(source.path)
        hashes = zip(matches, file_hashes([file.path for file in matches], cache), strict=True)
        files = [file.model_copy(update={"sha256": sha}) for file, sha in hashes]
        identity = [{"name": f.path.name, "bytes": f.path.stat().st_size, "sha256": f.sha256} for f in files]
        return LocatedSource(source, identity, files)
    assert source.hub is not None
    commit, contents = _hub_identity(source, Repository(source.hub, "dataset", source.revision))
    return LocatedSource(source.model_copy(update={"revision": commit}), contents, [])


def _hub_identity(source: DataSource, repository: Repository) -> tuple[str, JsonObject]:
    """Return the commit and the identity of its rows: hashes of the data files, and the configs that divide them."""
    commit = repository.commit()
    files = repository.files(commit)
    data = {name: blob for name, blob in files.items() if is_readable(PurePath(name)) or name in CARD_FILES[1:]}
    card = (repository.fetch(commit, [CARD]) / CARD).read_text("utf-8-sig", errors="replace") if CARD in files else ""
    fields = {"hub": source.hub, "config": source.config, "split": source.split}
    return commit, {**fields, "configs": _read_configs(card), "files": data}


def _read_configs(card: str) -> Any:
    """Return the configs and splits from the YAML header of the card, or the header's text if it cannot be parsed.

    A header with aliases is not parsed: a few lines could expand beyond any memory.
    """
    header = _HEADER.match(card)
    if header is None:
        return None
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header[1])):
            return header[1]
        fields = yaml.safe_load(header[1])
        configs = fields.get("configs") if isinstance(fields, dict) else None
        return json.loads(json.dumps(configs, default=str, allow_nan=False, ensure_ascii=False).encode())
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return header[1]


def _identity_of_download(ref: ModelRef, commit: str, folder: Path, cache: HashCache | None = None) -> ModelIdentity:
    """Return the identity of a downloaded model. Errors list the weights in the repository; the cache's folder is unhelpful."""
    try:
        return weights_identity(folder, cache)
    except ModelError as error:
        files = sorted(name for name in ref.repository.files(commit) if name.endswith(_WEIGHT_SUFFIXES))
        raise ModelError(
            f"it cannot be used: {without_code(str(error))}; the weights in that repository: {', '.join(files) or 'none'}",
            error.code,
        ) from error
