"""Log-probs of the reference model scored again: a few, to compare them with the table, or all, where these are not right."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from assets.execution.materialize import JobSpec, describe_job, run_work
from assets.lineage.history import History
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import StoreError, UsageError
from training.contract.identity.fingerprint import short
from training.contract.store.logprob_cache import scoring_rule
from training.contract.store.manifest import Manifest, read_manifest
from training.contract.store.store import Artifact, Store

_TABLE = "reference_logprobs"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rescored:
    """`rows` as `training/jobs/rescore.py` writes them; `tolerance`: nats by the root of the count of response tokens."""

    rows: list[dict[str, Any]]
    tolerance: float


@dataclass(frozen=True)
class SetAside:
    """The log-probs of `sequences`, in `shards` of the memo, and the `tables` made of them; `folders` have all of it now."""

    recipe: str
    sequences: int
    shards: int
    tables: list[str]
    folders: list[Path]


def rescore(pipeline: Pipeline, services: Services, inputs: dict[str, Artifact], rows: int | list[int]) -> Rescored:
    """Score the given `rows`, or that many spread over the table, with the policy in `inputs`, else the reference model.

    It is done by a job of one process. The store is not asked: the point is to compute them anew.
    """
    work = JobSpec("proof", {"rows": rows})
    job = describe_job(pipeline, services, "proof", work, {name: given.fingerprint for name, given in inputs.items()})
    alone = job.compute.model_copy(update={"processes_per_node": 1, "nodes": 1})
    job = job.model_copy(update={"compute": alone})
    with services.store.lock("proof", job.derivation.key) as lock:
        made = run_work(services, job, work, lock, _LOG)
    return Rescored(made.json("rescored.json"), made.details["tolerance"])


def set_scores_aside(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> SetAside:
    """Set aside all log-probs of the reference model, and the recipe's tables of them: the next run scores them again.

    Raises UsageError if there are none.
    """
    store, history = services.store, History(instance, pipeline, services.store)
    model, dtype = history.fingerprint("reference_model"), pipeline.recipe.reference.dtype
    rule = scoring_rule(model, dtype)
    memo = f"memo/{rule}"
    manifests = {name: _manifest(store, memo, name) for name in store.fingerprints(memo)}
    tables = list(_tables(store, rule, history.fingerprint("tokenized_pairs")))
    if not manifests and not tables:
        raise UsageError(
            f"nothing was scored with the reference model {short(model)} in {dtype}, so there is nothing to set aside; "
            f"`pedigree run {pipeline.argument}` scores"
        )
    folders = [_set_aside(store, kind, name) for kind, names in ((memo, manifests), (_TABLE, tables)) for name in names]
    sequences = sum(manifest.details.get("sequences", 0) for manifest in manifests.values() if manifest)
    parents = sorted({folder.parent.parent for folder in folders if folder})
    return SetAside(pipeline.name, sequences, len(manifests), tables, parents)


def _tables(store: Store, rule: str, pairs: str) -> Iterator[str]:
    """The tables of these pairs. What other recipes made of the same log-probs is left to them: it may be right."""
    for name in store.fingerprints(_TABLE):
        manifest = _manifest(store, _TABLE, name)
        if manifest is not None and manifest.details.get("rule") == rule:
            made_from = manifest.made_from.inputs.get("tokenized_pairs")
            if made_from is not None and made_from.fingerprint == pairs:
                yield name


def _manifest(store: Store, kind: str, name: str) -> Manifest | None:
    with contextlib.suppress(StoreError):
        return read_manifest(store.folder(kind, name))
    return None


def _set_aside(store: Store, kind: str, name: str) -> Path | None:
    """Where it is now; None if another process was first."""
    with store.lock(kind, name), contextlib.suppress(FileNotFoundError):
        return store.set_aside(kind, name)
    return None
