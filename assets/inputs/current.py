"""The five assets that look at the outside world, sources and specs: what each would be if it were materialized now.

Their bodies, `pedigree status` and `pedigree plan` all ask here, so that they agree on what they see.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from assets.inputs.resolve import (
    LocatedModel,
    LocatedSource,
    LocatedTokenizer,
    RemoteModel,
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
from training.contract.files.hub import check_files
from training.contract.files.local_files import data_format
from training.contract.identity.fingerprint import fingerprint
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.model_identity import weight_files
from training.contract.store.manifest import Derivation

ROOTS = tuple(name for name, node in GRAPH.items() if not node.needs)


@dataclass(frozen=True)
class ResolvedInput:
    """How a source or a spec would be made now, and what it would be.

    This class itself is for what follows from the recipe alone, and for a pointer to the base model.

    `fingerprint` is None where only a job or a download can tell; `files` holds the JSON files of the artifact by name,
    unless a job writes them.
    """

    derivation: Derivation
    fingerprint: str | None
    files: dict[str, Any]

    @property
    def asset(self) -> str:
        return self.derivation.kind

    def details(self) -> dict[str, Any]:
        """The details of its artifact, found when it is recorded for the first time."""
        return {}


@dataclass(frozen=True)
class ResolvedData(ResolvedInput):
    """`sources`: in the order of the recipe."""

    sources: list[LocatedSource]

    @property
    def identity(self) -> list[Any]:
        return [source.identity for source in self.sources]

    @property
    def paths(self) -> dict[str, Path]:
        """The local files of all sources, by the names that `named_files` gives them."""
        paths = [file.path for source in self.sources for file in source.files]
        return dict(zip(named_files(self.identity), paths, strict=True))

    @property
    def hubs(self) -> list[dict[str, Any]]:
        """The sources that are data sets of the hub."""
        return [source.settings for source in self.sources if source.settings["hub"]]

    def count_rows(self) -> dict[str, int | None]:
        """The rows of every file by name, and of every hub data set, whose rows are unknown until a job reads it."""
        files = {name: count_rows(path) for name, path in self.paths.items()}
        return files | {f"{source['hub']} ({source['split']}) {n}": None for n, source in enumerate(self.hubs, 1)}

    def details(self) -> dict[str, Any]:
        sizes = [path.stat().st_size for path in self.paths.values()]
        return {"files": len(sizes), "bytes": sum(sizes), "rows": self.count_rows()}


@dataclass(frozen=True)
class ResolvedModel(ResolvedInput):
    """`located` is None where the model has to be downloaded first."""

    located: LocatedModel | None

    def details(self) -> dict[str, Any]:
        """Raises HubError where a download is not what the hub promised."""
        assert self.located is not None
        if self.located.commit is not None:
            check_files([*weight_files(self.located.folder), self.located.folder / "config.json"])
        weights = self.located.identity["weights"]
        return {name: weights[name] for name in ("tensors", "bytes")}


@dataclass(frozen=True)
class ResolvedTokenizer(ResolvedInput):
    """What a tokenization spec is made from; a job makes it."""

    located: LocatedTokenizer


@dataclass(frozen=True)
class ResolvedRelease(ResolvedInput):
    """What a release spec is made from; a job makes it. `shipping` is None if the base model has to be downloaded first."""

    tokenizer: LocatedTokenizer
    shipping: LocatedShippedFiles | None


def resolve_root(pipeline: Pipeline, services: Services, asset: str, cache: HashCache | None = None) -> ResolvedInput:
    """`asset`, one of `ROOTS`, as it would be now. Raises DataError, HubError, ModelError or RegistryError.

    With a `cache`, files in it are not read again, and no model of the hub is downloaded.
    """
    match asset:
        case "preference_source":
            return find_data(pipeline, cache)
        case "base_model":
            return find_model(pipeline, services, cache)
        case "tokenization_spec":
            return find_tokenizer(pipeline, services, cache)
        case "release_spec":
            return find_release(pipeline, services, cache)
        case "evaluation_spec":
            return _find_evaluation(pipeline, services, cache)
    fields = GRAPH[asset].reads(pipeline.recipe)
    if asset == "training_spec" and pipeline.recipe.training.start_from == "champion":
        champion = locate_champion(pipeline.recipe, services.registry, cache)
        fields = {**fields, "champion": champion and champion.fingerprint}
    return ResolvedInput(derive(asset, {}, fields), fingerprint(asset, fields), {"spec.json": fields})


def find_data(pipeline: Pipeline, cache: HashCache | None = None) -> ResolvedData:
    """The preference sources. File names give the order and, by their extensions, how they are read, and nothing else.

    So a moved file, or one with another name, is the same data.
    """
    sources = locate_sources(pipeline, cache)
    identity = [source.identity for source in sources]
    contents = [
        [[file["sha256"], data_format(PurePath(file["name"]))] for file in each] if isinstance(each, list) else each
        for each in identity
    ]
    how = derive("preference_source", {}, {"sources": identity})
    return ResolvedData(how, fingerprint("preference_source", contents), {"sources.json": identity}, sources)


def find_model(pipeline: Pipeline, services: Services, cache: HashCache | None = None) -> ResolvedModel:
    if cache is None:
        emit = emitting(services.listener, "base_model")
        located: LocatedModel | RemoteModel = locate_base_model(pipeline, services.registry, emit)
    else:
        located = peek_base_model(pipeline, services.registry, cache)
    if isinstance(located, RemoteModel):
        return ResolvedModel(derive("base_model", {}, asdict(located)), None, {}, None)
    how = derive("base_model", {}, located.identity)
    return ResolvedModel(how, located.fingerprint, {"identity.json": located.identity}, located)


def find_tokenizer(pipeline: Pipeline, services: Services, cache: HashCache | None = None) -> ResolvedTokenizer:
    located = locate_tokenizer(pipeline, services.registry, cache)
    settings = {**GRAPH["tokenization_spec"].reads(pipeline.recipe), **located.identity}
    return ResolvedTokenizer(derive("tokenization_spec", {}, settings), None, {}, located)


def find_release(pipeline: Pipeline, services: Services, cache: HashCache | None = None) -> ResolvedRelease:
    tokenizer = locate_tokenizer(pipeline, services.registry, cache)
    shipping = locate_shipping(pipeline, services.registry, cache)
    settings = {**GRAPH["release_spec"].reads(pipeline.recipe), **tokenizer.identity}
    if isinstance(shipping, RemoteModel):
        return ResolvedRelease(derive("release_spec", {}, settings | asdict(shipping)), None, {}, tokenizer, None)
    return ResolvedRelease(derive("release_spec", {}, settings | shipping.identity), None, {}, tokenizer, shipping)


def _find_evaluation(pipeline: Pipeline, services: Services, cache: HashCache | None) -> ResolvedInput:
    """The fields of the recipe, and at which tokens the base model's files say that the released model stops."""
    fields = GRAPH["evaluation_spec"].reads(pipeline.recipe)
    shipping = locate_shipping(pipeline, services.registry, cache)
    if isinstance(shipping, RemoteModel):
        return ResolvedInput(derive("evaluation_spec", {}, fields | asdict(shipping)), None, {})
    fields = fields | {"eos_token_ids": shipping.identity["eos_token_ids"]}
    return ResolvedInput(
        derive("evaluation_spec", {}, fields), fingerprint("evaluation_spec", fields), {"spec.json": fields}
    )


def named_files(identity: list[Any]) -> dict[str, dict[str, Any]]:
    """The files of all sources by name; of several with one name, each further one gets a number."""
    named: dict[str, dict[str, Any]] = {}
    repeated: Counter[str] = Counter()  # kept, since a glob may find thousands of files of one name
    for entry in (entry for source in identity if isinstance(source, list) for entry in source):
        name = own = entry["name"]
        while name in named:
            repeated[own] += 1
            name = f"{own} ({repeated[own] + 1})"
        named[name] = entry
    return named
