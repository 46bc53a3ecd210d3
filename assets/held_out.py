"""What an evaluation says of each held-out pair, for whoever compares two policies: the gate, and `pedigree compare`.

A pair is known by the tokens of its two sequences: two evaluations share those pairs that both saw in the same words, and
one that stands in the data twice counts once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow.parquet as pq

from assets.pipeline import Pipeline
from assets.realize import latest_derivation
from training.contract.loss import Loss
from training.contract.manifest import Derivation
from training.contract.store import Artifact, Store

Row = Mapping[str, Any]
_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Ancestor:
    """An artifact that something stands on, and how it was made when it was last materialized."""

    fingerprint: str
    derivation: Derivation


def ancestry(
    instance: dg.DagsterInstance, pipeline: Pipeline, store: Store, heads: Mapping[str, str]
) -> dict[str, Ancestor]:
    """The `heads` (fingerprints by kind) and every artifact they stand on, by kind. Raises StoreError if one is gone."""
    found: dict[str, Ancestor] = {}
    waiting = list(heads.items())
    while waiting:
        kind, fingerprint = waiting.pop()
        if kind not in found:
            how = latest_derivation(instance, pipeline, store, kind, fingerprint)
            found[kind] = Ancestor(fingerprint, how)
            waiting += [(source.kind, source.fingerprint) for source in how.inputs.values()]
    return found


def rows_by_pair(evaluation: Artifact) -> dict[str, Row]:
    """The rows of the evaluation's table, by the pair's identity."""
    rows = pq.read_table(evaluation.file("pairs.parquet")).to_pylist()
    return {row["chosen_key"] + row["rejected_key"]: row for row in rows}


def loss(row: Row) -> float:
    return float(row["loss"])


def accuracy(row: Row) -> float:
    """1 where the chosen response has the higher reward, else 0: a number of the same meaning under every loss."""
    return float(row["margin"] > 0)


def margin(row: Row) -> float:
    """The log-ratio (policy over reference) of the chosen response less that of the rejected one, in nats.

    It is the reward's margin before beta, so it can be compared among betas and among losses.
    """
    chosen, rejected = (row[f"policy_{side}_logprob"] - row[f"reference_{side}_logprob"] for side in _SIDES)
    return float(chosen - rejected)


def scale_of(evaluation: Artifact) -> tuple[str, ...]:
    """The kinds that decide the scale of a held-out loss; the other pairs too, where a pair's loss depends on them."""
    settings = Loss.model_validate(evaluation.derivation.settings["loss"])
    of_batch = ("tokenized_pairs",) if settings.depends_on_batch else ()
    return ("reference_model", "evaluation_spec", *of_batch)
