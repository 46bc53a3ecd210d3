"""Scoring the reference model again: a few pairs for comparison with the table, or all pairs if the table is wrong."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from assets.execution.materialize import JobSpec, describe_job, run_work
from assets.lineage.history import History
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import StoreError, UsageError
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import REFERENCE_LOGPROBS, RESCORED, AssetName
from training.contract.protocol.details import RescoredPair
from training.contract.protocol.settings import RescoreSettings
from training.contract.store.artifact import Artifact
from training.contract.store.logprob_cache import scoring_rule
from training.contract.store.manifest import Manifest, read_manifest
from training.contract.store.shard_cache import ShardDetails
from training.contract.store.store import Store

_TABLE = AssetName.REFERENCE_LOGPROBS
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rescored:
    """`rows`: the output of `training/jobs/rescore.py`. `tolerance`: nats per root of the count of response tokens."""

    rows: list[RescoredPair]
    tolerance: float


@dataclass(frozen=True)
class SetAside:
    """The log-probs set aside: counts of sequences and cache shards, the tables' fingerprints, and the new folders."""

    recipe: str
    sequences: int
    shards: int
    tables: list[str]
    folders: list[Path]


def rescore(pipeline: Pipeline, services: Services, inputs: dict[str, Artifact], rows: int | list[int]) -> Rescored:
    """Score the given `rows`, or that many evenly spaced ones, with the policy in `inputs`, else with the reference model.

    A job of one process does it. The store is not looked up, because the purpose is a new computation.
    """
    work = JobSpec("proof", RescoreSettings(rows=rows if isinstance(rows, int) else tuple(rows)))
    fingerprints = {name: artifact.fingerprint for name, artifact in inputs.items()}
    job = describe_job(pipeline, services, RESCORED.name, work, fingerprints)
    one_process = job.compute.model_copy(update={"processes_per_node": 1, "nodes": 1})
    job = job.model_copy(update={"compute": one_process})
    with services.store.lock(RESCORED.name, job.derivation.key) as lock:
        artifact = run_work(services, RESCORED, job, work, lock, _LOG)
    rescored = [RescoredPair.model_validate(row) for row in artifact.json("rescored.json")]
    return Rescored(rescored, artifact.details.tolerance)


def set_scores_aside(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> SetAside:
    """Set aside all log-probs of the reference model, and the recipe's tables of them. The next run scores again.

    Raise UsageError without any log-probs.
    """
    store, history = services.store, History(instance, pipeline, services.store)
    model, dtype = history.fingerprint(AssetName.REFERENCE_MODEL), pipeline.recipe.reference.dtype
    rule = scoring_rule(model, dtype)
    cache_kind = f"memo/{rule}"
    manifests = {name: _read_manifest(store, cache_kind, name) for name in store.fingerprints(cache_kind)}
    tables = list(_find_tables(store, rule, history.fingerprint(AssetName.TOKENIZED_PAIRS)))
    if not manifests and not tables:
        raise UsageError(
            f"the reference model {short(model)} lacks log-probs in {dtype}, so nothing can be set aside; "
            f"`pedigree run {pipeline.argument}` computes them",
            "no-scores",
        )
    kinds = ((cache_kind, manifests), (_TABLE, tables))
    folders = [_set_aside(store, kind, name) for kind, names in kinds for name in names]
    sequences = sum(ShardDetails.model_validate(found.details).sequences for found in manifests.values() if found)
    parents = sorted({folder.parent.parent for folder in folders if folder})
    return SetAside(pipeline.name, sequences, len(manifests), tables, parents)


def _find_tables(store: Store, rule: str, pairs: str) -> Iterator[str]:
    """Yield the tables of these pairs. Tables of other recipes with the same log-probs are kept: they may be right."""
    for name in store.fingerprints(_TABLE):
        manifest = _read_manifest(store, _TABLE, name)
        if manifest is not None and REFERENCE_LOGPROBS.parse(manifest.details, store.folder(_TABLE, name)).rule == rule:
            made_from = manifest.made_from.inputs.get(AssetName.TOKENIZED_PAIRS)
            if made_from is not None and made_from.fingerprint == pairs:
                yield name


def _read_manifest(store: Store, kind: str, name: str) -> Manifest | None:
    with contextlib.suppress(StoreError):
        return read_manifest(store.folder(kind, name))
    return None


def _set_aside(store: Store, kind: str, name: str) -> Path | None:
    """Set an artifact aside. Return its new folder; None if another process was first."""
    with store.lock(kind, name), contextlib.suppress(FileNotFoundError):
        return store.set_aside(kind, name)
    return None
