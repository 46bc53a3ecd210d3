"""One row of a recipe's data, from the messages to the log-probs: what `pedigree inspect` shows.

The policy's log-probs of held-out pairs are in its evaluation. Those of training pairs are needed nowhere else, so a job
computes them on demand; else they are None.
"""

from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from assets.adapters import base_of
from assets.materialized import latest, latest_derivation
from assets.page import render_page
from assets.pipeline import Pipeline, Services
from assets.rescoring import rescore
from assets.rows import PairReader, TokenizedRow, TokenizedSide, find_row
from training.contract.errors import UsageError
from training.contract.fingerprint import short
from training.contract.store import Artifact
from workflows.execution import in_gpu_pool

_TO_SCORE = ("tokenized_pairs", "reference_logprobs", "policy")


@dataclass(frozen=True)
class InspectedSide(TokenizedSide):
    """`policy_logprob` is None where the policy was not evaluated on the pair and no score was asked for."""

    policy_logprob: float | None


@dataclass(frozen=True)
class InspectedRow:
    row: int
    split: str
    messages: dict[str, Any]
    chosen: InspectedSide
    rejected: InspectedSide


def inspect_row(
    pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, row: int, score: bool = False
) -> InspectedRow:
    """Row `row` of `raw_preferences`; with `score`, the policy's log-probs are computed where they are not known.

    Raises UsageError where the row is not there, was dropped, or nothing was materialized.
    """
    return _Inspector(pipeline, services, instance).read(row, score)


def inspection_page(pipeline: Pipeline, found: InspectedRow) -> str:
    """The row as a self-contained HTML page."""
    policy = {found.row: (found.chosen.policy_logprob, found.rejected.policy_logprob)}
    row = TokenizedRow(found.row, found.split, found.chosen, found.rejected)
    return render_page(f"{pipeline.name}: row {found.row}", [row], policy)


class _Inspector:
    def __init__(self, pipeline: Pipeline, services: Services, instance: dg.DagsterInstance):
        self._pipeline, self._services, self._instance = pipeline, services, instance

    def read(self, row: int, score: bool) -> InspectedRow:
        raw = self._demanded("raw_preferences")
        table = pq.read_table(raw.file("preferences.parquet"))
        messages = _row(table, row)
        if messages is None:
            raise UsageError(
                f"there is no row {row} in raw_preferences {short(raw.fingerprint)}; "
                f"its {len(table):,} rows are numbered from 0"
            )
        pairs = self._demanded("tokenized_pairs")
        reader = PairReader(self._services.store, pairs, self._table_of(pairs))
        tokens = reader.read(row)
        if tokens is None:
            raise UsageError(f"row {row} has no tokens: it was dropped when the pairs were tokenized")
        policy = self._evaluated(row, reader.keys(row))
        if policy is None and score:
            policy = self._scored(pairs, row)
        chosen, rejected = policy or (None, None)
        return InspectedRow(
            row,
            tokens.split,
            messages,
            InspectedSide(**vars(tokens.chosen), policy_logprob=chosen),
            InspectedSide(**vars(tokens.rejected), policy_logprob=rejected),
        )

    def _table_of(self, pairs: Artifact) -> Artifact | None:
        """The table of log-probs, unless it belongs to other pairs, as it may after a run that ended early."""
        table = self._materialized("reference_logprobs")
        if table is None:
            return None
        how = latest_derivation(
            self._instance, self._pipeline, self._services.store, "reference_logprobs", table.fingerprint
        )
        return table if how.inputs["tokenized_pairs"].fingerprint == pairs.fingerprint else None

    def _evaluated(self, row: int, keys: tuple[str, str] | None) -> tuple[float, float] | None:
        """The policy's log-probs of the pair, unless the row had other tokens when the policy was evaluated."""
        evaluation = self._materialized("evaluation")
        found = None if evaluation is None else _row(pq.read_table(evaluation.file("pairs.parquet")), row)
        if found is None or (found["chosen_key"], found["rejected_key"]) != keys:
            return None
        return found["policy_chosen_logprob"], found["policy_rejected_logprob"]

    def _scored(self, pairs: Artifact, row: int) -> tuple[float, float]:
        inputs = {name: self._demanded(name) for name in _TO_SCORE}
        if self._table_of(pairs) is None:
            name = self._pipeline.name
            raise UsageError(
                f"{name}/reference_logprobs is of other pairs than {name}/tokenized_pairs {short(pairs.fingerprint)}, so "
                f"row {row} cannot be scored; run `pedigree run {self._pipeline.argument}` first"
            )
        if (base := base_of(inputs["policy"], self._services.store)) is not None:
            inputs["reference_model"] = base
        [scored] = in_gpu_pool(
            "inspect",
            self._services,
            self._instance,
            lambda: rescore(self._pipeline, self._services, inputs, [row]).rows,
        )
        return scored["chosen"]["live"], scored["rejected"]["live"]

    def _demanded(self, asset: str) -> Artifact:
        artifact = self._materialized(asset)
        if artifact is None:
            name = self._pipeline.name
            raise UsageError(
                f"{name}/{asset} was never materialized; run `pedigree run {self._pipeline.argument}` first"
            )
        return artifact

    def _materialized(self, asset: str) -> Artifact | None:
        found = latest(self._instance, self._pipeline.key(asset)).fingerprint
        return None if found is None else self._services.store.open(asset, found)


def _row(table: pa.Table, row: int) -> dict[str, Any] | None:
    index = find_row(table, row)
    return None if index is None else table.slice(index, 1).to_pylist()[0]
