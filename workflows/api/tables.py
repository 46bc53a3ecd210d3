"""Artifacts as Arrow tables, and the latest artifact of an asset.

Legend: P pairs.
"""

import difflib
from collections.abc import Callable, Collection

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from assets.lineage.history import History
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_reader import read_pairs
from training.contract.errors import UsageError
from training.contract.protocol.artifacts import KINDS, TOKENIZED_PAIRS, AssetName
from training.contract.protocol.events import read_events
from training.contract.protocol.prequential import SCORES_FILE
from training.contract.store.artifact import Artifact
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Store


def check_asset(asset: str, known: Collection[str] = GRAPH.keys()) -> None:
    """Raise UsageError with the most similar name, and all names, unless `asset` is one of `known`."""
    if asset not in known:
        similar = difflib.get_close_matches(asset, known, n=1)
        suggestion = f"did you mean {similar[0]!r}? " if similar else ""
        raise UsageError(
            f"{asset!r} is not an asset: {suggestion}The assets are {', '.join(known)}",
            "unknown-asset",
        )


def check_has_table(asset: str) -> None:
    """Raise UsageError with the assets that have a table, unless `asset` has one."""
    check_asset(asset)
    if asset not in _TABLES:
        raise UsageError(f"{asset} has no table; these assets have one: {', '.join(_TABLES)}", "no-table")


def latest_artifact(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, asset: str) -> Artifact:
    """Return the artifact of the latest materialization of `asset`; unchanged files are not hashed again.

    Raises UsageError without a materialization, StoreError if the artifact is missing or corrupt.
    """
    check_asset(asset)
    if asset == AssetName.RELEASED_MODEL:
        raise UsageError(
            "released_model has no artifact in the store, because its files are in the registry: use `champion()` or "
            "`versions()`",
            "no-artifact",
        )
    history = History(instance, pipeline, services.store, assets=(asset,))
    fingerprint, key = history.fingerprint(asset), history.latest(asset).key
    kind = KINDS[asset]
    found = None if key is None else services.store.find(kind, key, cache=services.hashes)
    if found is not None and found.fingerprint == fingerprint:
        return found
    return services.store.open(kind, fingerprint, cache=services.hashes)


def read_table(store: Store, asset: str, artifact: Artifact) -> pa.Table:
    """Return the table of an artifact of `asset`, which has one."""
    return _TABLES[asset](store, artifact)


def _raw_preferences(_: Store, rows: Artifact) -> pa.Table:
    return pq.read_table(rows.file("preferences.parquet"))


def _tokenized_pairs(_: Store, pairs: Artifact) -> pa.Table:
    return read_pairs(pairs)


def _reference_logprobs(store: Store, logprobs: Artifact) -> pa.Table:
    """Return the table of log-probs, after the columns `row` and `split` of the pairs they belong to, each [P]."""
    scored = logprobs.derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint
    pairs = read_pairs(store.open(TOKENIZED_PAIRS, scored, hashes=False))
    columns = LogProbTable.read(logprobs.folder, len(pairs)).columns()
    return pa.table({"row": pairs["row"], "split": pairs["split"], **columns})


def _evaluation(_: Store, evaluation: Artifact) -> pa.Table:
    return pq.read_table(evaluation.file("pairs.parquet"))


def _prequential_scores(_: Store, scores: Artifact) -> pa.Table:
    """Return one row for each policy and pair; no row and no column if nothing had arrived."""
    return pq.read_table(scores.file(SCORES_FILE)) if SCORES_FILE in scores.manifest.files else pa.table({})


_TABLES: dict[str, Callable[[Store, Artifact], pa.Table]] = {
    AssetName.RAW_PREFERENCES: _raw_preferences,
    AssetName.TOKENIZED_PAIRS: _tokenized_pairs,
    AssetName.REFERENCE_LOGPROBS: _reference_logprobs,
    AssetName.PREQUENTIAL_SCORES: _prequential_scores,
    AssetName.EVALUATION: _evaluation,
}


def read_steps(policy: Artifact) -> pa.Table:
    """Return the `step` events of the policy's training, one row per step, in order."""
    events = [event for event in read_events(policy.file("events.jsonl")) if event["event"] == "step"]
    names = dict.fromkeys(("step", "loss", *(name for event in events for name in event)))
    return pa.table({name: [event.get(name) for event in events] for name in names if name != "event"})
