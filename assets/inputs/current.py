"""The current state of sources and specs: the result of materializing each of them now.

Their bodies, `pedigree status` and `pedigree plan` share this module, so that they agree.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from assets.inputs.resolve import (
    LocatedModel,
    LocatedSource,
    LocatedTokenizer,
    locate_base_model,
    locate_champion,
    locate_sources,
    locate_tokenizer,
    peek_base_model,
)
from assets.inputs.row_count import count_rows
from assets.inputs.shipped_files import LocatedShippedFiles, locate_shipping
from assets.pipeline.graph import GRAPH, derive
from assets.pipeline.pipeline import Pipeline, Services, emitting
from training.contract.config.data_source import DataSource
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import Settings
from training.contract.files.hub import check_files
from training.contract.files.local_files import data_format
from training.contract.identity.fingerprint import fingerprint
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.model_identity import weight_files
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import ModelDetails, SourceDetails
from training.contract.protocol.settings import (
    EvaluationRules,
    EvaluationSpec,
    ReleaseFilesSettings,
    ReleaseRules,
    RemoteModel,
    SourcesSettings,
    TokenizationRules,
    TokenizationSettings,
    TrainingSpec,
    join_fields,
)
from training.contract.protocol.spec_files import SPEC_FILE
from training.contract.store.artifact_kind import Details
from training.contract.store.manifest import Derivation

ROOTS = tuple(name for name, node in GRAPH.items() if not node.needs)


@dataclass(frozen=True)
class ResolvedInput:
    """The derivation and the result of materializing a source or a spec now.

    This base class is for specs that follow from the recipe alone, and for a pointer to the base model. `fingerprint`: None if
    it takes a job or a download to know it. `files`: the artifact's JSON files by name, unless a job writes them.
    """

    derivation: Derivation
    fingerprint: str | None
    files: JsonObject

    @property
    def asset(self) -> str:
        return self.derivation.kind

    def details(self) -> Details:
        """Return the details of its artifact. They are computed only when the artifact is published."""
        return Details()


@dataclass(frozen=True)
class ResolvedData(ResolvedInput):
    """The preference sources, in the order of the recipe."""

    sources: list[LocatedSource]

    @property
    def identity(self) -> list[Any]:
        return [source.identity for source in self.sources]

    @property
    def paths(self) -> dict[str, Path]:
        """The local files of all sources, by their names in `named_files`."""
        paths = [file.path for source in self.sources for file in source.files]
        return dict(zip(named_files(self.identity), paths, strict=True))

    @property
    def hubs(self) -> list[DataSource]:
        """The sources that are data sets of the hub, with revisions resolved to commits."""
        return [source.settings for source in self.sources if source.settings.hub]

    def count_rows(self) -> dict[str, int | None]:
        """Return the row count of every file by name; None for a hub data set, unknown until a job reads it."""
        files = {name: count_rows(path) for name, path in self.paths.items()}
        return files | {f"{source.hub} ({source.split}) {n}": None for n, source in enumerate(self.hubs, 1)}

    def details(self) -> SourceDetails:
        sizes = [path.stat().st_size for path in self.paths.values()]
        return SourceDetails(files=len(sizes), bytes=sum(sizes), rows=self.count_rows())


@dataclass(frozen=True)
class ResolvedModel(ResolvedInput):
    """The base model. `located` is None if it must be downloaded first."""

    located: LocatedModel | None

    def details(self) -> ModelDetails:
        """Return its sizes. Raise HubError if a download differs from the hub's hashes."""
        assert self.located is not None
        if self.located.commit is not None:
            check_files([*weight_files(self.located.folder), self.located.folder / "config.json"])
        weights = self.located.identity.weights
        return ModelDetails(tensors=weights.tensors, bytes=weights.bytes)


@dataclass(frozen=True)
class ResolvedTokenizer(ResolvedInput):
    """The input of a tokenization spec; a job makes the spec."""

    located: LocatedTokenizer
    settings: TokenizationSettings


@dataclass(frozen=True)
class ResolvedRelease(ResolvedInput):
    """The input of a release spec; a job makes the spec. `shipping` is None if the base model must be downloaded first."""

    tokenizer: LocatedTokenizer
    shipping: LocatedShippedFiles | None
    settings: ReleaseFilesSettings | None


def resolve_root(pipeline: Pipeline, services: Services, asset: str, cache: HashCache | None = None) -> ResolvedInput:
    """Resolve `asset`, one of `ROOTS`. Raise DataError, HubError, ModelError or RegistryError.

    With a `cache`, files in it are not read again, and no model is downloaded from the hub.
    """
    match asset:
        case AssetName.PREFERENCE_SOURCE:
            return find_data(pipeline, cache)
        case AssetName.BASE_MODEL:
            return find_model(pipeline, services, cache)
        case AssetName.TOKENIZATION_SPEC:
            return find_tokenizer(pipeline, services, cache)
        case AssetName.RELEASE_SPEC:
            return find_release(pipeline, services, cache)
        case AssetName.EVALUATION_SPEC:
            return _find_evaluation(pipeline, services, cache)
    assert asset == AssetName.TRAINING_SPEC, f"{asset} is not one of {ROOTS}"
    return _find_training(pipeline, services, cache)


def find_data(pipeline: Pipeline, cache: HashCache | None = None) -> ResolvedData:
    """Resolve the preference sources.

    File names matter only for the order and, by their extensions, for the file format. So moved or renamed files are the same
    data.
    """
    sources = locate_sources(pipeline, cache)
    identity = [source.identity for source in sources]
    contents = [
        [[file["sha256"], data_format(PurePath(file["name"]))] for file in source]
        if isinstance(source, list)
        else source
        for source in identity
    ]
    derivation = derive(AssetName.PREFERENCE_SOURCE, {}, SourcesSettings(sources=tuple(identity)))
    content = fingerprint(AssetName.PREFERENCE_SOURCE, contents)
    return ResolvedData(derivation, content, {"sources.json": identity}, sources)


def find_model(pipeline: Pipeline, services: Services, cache: HashCache | None = None) -> ResolvedModel:
    if cache is None:
        emit = emitting(services.listener, AssetName.BASE_MODEL)
        located: LocatedModel | RemoteModel = locate_base_model(pipeline, services.registry, emit)
    else:
        located = peek_base_model(pipeline, services.registry, cache)
    if isinstance(located, RemoteModel):
        return ResolvedModel(derive(AssetName.BASE_MODEL, {}, located), None, {}, None)
    derivation = derive(AssetName.BASE_MODEL, {}, located.identity)
    return ResolvedModel(derivation, located.identity.fingerprint, {"identity.json": derivation.settings}, located)


def find_tokenizer(pipeline: Pipeline, services: Services, cache: HashCache | None = None) -> ResolvedTokenizer:
    located = locate_tokenizer(pipeline, services.registry, cache)
    settings = TokenizationSettings(**join_fields(TokenizationRules.of(pipeline.recipe), located.identity))
    return ResolvedTokenizer(derive(AssetName.TOKENIZATION_SPEC, {}, settings), None, {}, located, settings)


def find_release(pipeline: Pipeline, services: Services, cache: HashCache | None = None) -> ResolvedRelease:
    tokenizer = locate_tokenizer(pipeline, services.registry, cache)
    shipping = locate_shipping(pipeline, services.registry, cache)
    rules = ReleaseRules.of(pipeline.recipe)
    if isinstance(shipping, RemoteModel):
        derivation = derive(AssetName.RELEASE_SPEC, {}, rules, tokenizer.identity, shipping)
        return ResolvedRelease(derivation, None, {}, tokenizer, None, None)
    settings = ReleaseFilesSettings(**join_fields(rules, tokenizer.identity, shipping.identity))
    return ResolvedRelease(derive(AssetName.RELEASE_SPEC, {}, settings), None, {}, tokenizer, shipping, settings)


def _find_training(pipeline: Pipeline, services: Services, cache: HashCache | None) -> ResolvedInput:
    """Resolve the training spec: fields of the recipe, and the champion from which the training starts."""
    settings = TrainingSpec.of(pipeline.recipe)
    if settings.start_from == "champion":
        champion = locate_champion(pipeline.recipe, services.registry, cache)
        settings = settings.model_copy(update={"champion": champion and champion.fingerprint})
    return _frozen(AssetName.TRAINING_SPEC, settings)


def _find_evaluation(pipeline: Pipeline, services: Services, cache: HashCache | None) -> ResolvedInput:
    """Resolve the evaluation spec: fields of the recipe, and the stop tokens from the base model's files."""
    rules = EvaluationRules.of(pipeline.recipe)
    shipping = locate_shipping(pipeline, services.registry, cache)
    if isinstance(shipping, RemoteModel):
        return ResolvedInput(derive(AssetName.EVALUATION_SPEC, {}, rules, shipping), None, {})
    settings = EvaluationSpec(**join_fields(rules), eos_token_ids=shipping.identity.eos_token_ids)
    return _frozen(AssetName.EVALUATION_SPEC, settings)


def _frozen(asset: AssetName, settings: Settings) -> ResolvedInput:
    derivation = derive(asset, {}, settings)
    return ResolvedInput(derivation, fingerprint(asset, derivation.settings), {SPEC_FILE: derivation.settings})


def named_files(identity: list[Any]) -> dict[str, JsonObject]:
    """Return the files of all sources by name. Repeated names get a number."""
    files: dict[str, JsonObject] = {}
    repeated: Counter[str] = Counter()  # avoids counting from 1 each time: a glob may match thousands of equal names
    for entry in (entry for source in identity if isinstance(source, list) for entry in source):
        name = file_name = entry["name"]
        while name in files:
            repeated[file_name] += 1
            name = f"{file_name} ({repeated[file_name] + 1})"
        files[name] = entry
    return files
