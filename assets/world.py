"""The five assets that look at the world, sources and specs: what each would be if it were materialized at this moment.

Their bodies, `pedigree status` and `pedigree plan` all ask here, so that none of them sees another world than the others.
"""

import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from assets.counting import count_rows
from assets.graph import GRAPH, derivation
from assets.locate import (
    AbsentModel,
    LocatedModel,
    LocatedTokenizer,
    glimpse_base_model,
    locate_base_model,
    locate_champion,
    locate_data,
    locate_tokenizer,
)
from assets.pipeline import Listener, Pipeline, Services
from training.contract.fingerprint import fingerprint
from training.contract.hash_cache import HashCache
from training.contract.job import JobKind
from training.contract.manifest import Derivation

ROOTS = tuple(name for name, node in GRAPH.items() if not node.needs)


@dataclass(frozen=True)
class Found:
    """How the asset would be made, and what it would be: `fingerprint` is None where only a job, or a download, can tell.

    `files` is what its artifact holds where no job writes it, `places` where the things lie that it names, and
    `tokenizer` the tokenizer of a tokenization spec.
    """

    derivation: Derivation
    fingerprint: str | None
    files: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    tokenizer: LocatedTokenizer | None = None

    @property
    def asset(self) -> str:
        return self.derivation.kind

    @property
    def job(self) -> JobKind | None:
        """The job that makes the artifact; None where its content is known already."""
        return "tokenizer" if self.asset == "tokenization_spec" else None


def look(pipeline: Pipeline, services: Services, asset: str, cache: HashCache | None = None) -> Found:
    """`asset`, one of `ROOTS`, as the world is now. Raises what looking raises: DataError, ModelError, RegistryError.

    With a `cache`, files that nobody wrote since they were hashed are not read, and no model is downloaded.
    """
    if asset == "preference_source":
        return _preference_source(pipeline, cache)
    if asset == "base_model":
        return _base_model(pipeline, services, cache)
    if asset == "tokenization_spec":
        return _tokenization_spec(pipeline, services, cache)
    fields = GRAPH[asset].reads(pipeline.recipe)
    if asset == "training_spec" and pipeline.recipe.training.start_from == "champion":
        champion = locate_champion(pipeline.recipe, services.registry, cache)
        fields = {**fields, "champion": champion and champion.fingerprint}
    return Found(derivation(asset, {}, fields), fingerprint(asset, fields), {"spec.json": fields})


def hash_cache(services: Services) -> HashCache:
    """What is known of files that nobody wrote since they were hashed: to look often, not to record or to compute."""
    return HashCache(services.home / "hashes.json")


def count_source_rows(found: Found) -> dict[str, int | None]:
    """The rows of every file of a `preference_source`, by the name it has in `named_files`, and of every hub data set.

    Those of the hub are not known before they are downloaded, to be read.
    """
    files = {name: count_rows(place) for name, place in found.places["files"].items()}
    return files | {f"{source['hub']} ({source['split']}) {n}": None for n, source in enumerate(found.places["hub"], 1)}


def named_files(identity: list[Any]) -> dict[str, dict[str, Any]]:
    """The files of all sources by name; of several with one name, each further one gets a number."""
    named: dict[str, dict[str, Any]] = {}
    for entry in (entry for source in identity if isinstance(source, list) for entry in source):
        name, number = entry["name"], 1
        while name in named:
            number += 1
            name = f"{entry['name']} ({number})"
        named[name] = entry
    return named


def _preference_source(pipeline: Pipeline, cache: HashCache | None) -> Found:
    located = locate_data(pipeline.recipe, cache)
    paths = [file.path for files in located.files for file in files]
    return Found(
        derivation("preference_source", {}, {"sources": located.identity}),
        located.fingerprint,
        {"sources.json": located.identity},
        {
            "sources": located.sources,
            "listed": [[file.model_dump(mode="json") for file in files] for files in located.files],
            "files": dict(zip(named_files(located.identity), paths, strict=True)),
            "hub": [source for source in located.sources if source["hub"]],
        },
    )


def _base_model(pipeline: Pipeline, services: Services, cache: HashCache | None) -> Found:
    if cache is None:
        hear = partial(_hear, services.listener, "base_model")
        located: LocatedModel | AbsentModel = locate_base_model(pipeline.recipe, services.registry, hear)
    else:
        located = glimpse_base_model(pipeline.recipe, services.registry, cache)
    if isinstance(located, AbsentModel):
        return Found(derivation("base_model", {}, asdict(located)), None)
    return Found(
        derivation("base_model", {}, located.identity),
        located.fingerprint,
        {"identity.json": located.identity},
        {"folder": located.folder, "commit": located.commit},
    )


def _hear(listener: Listener, asset: str, event: str, **fields: Any) -> None:
    """Tell of a download as a job tells of its work."""
    listener({"event": event, "time": time.time(), "asset": asset, **fields})


def _tokenization_spec(pipeline: Pipeline, services: Services, cache: HashCache | None) -> Found:
    tokenizer = locate_tokenizer(pipeline.recipe, services.registry, cache)
    settings = {**GRAPH["tokenization_spec"].reads(pipeline.recipe), **tokenizer.identity}
    places = {
        "tokenizer": str(tokenizer.folder),
        "revision": None,
        "chat_template": tokenizer.chat_template and str(tokenizer.chat_template),
    }
    return Found(derivation("tokenization_spec", {}, settings), None, {}, places, tokenizer)
