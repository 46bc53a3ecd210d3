"""One row of a recipe's data, from the messages to the log-probs: what `pedigree inspect` shows.

The policy's log-probs of held-out pairs are in its evaluation. Those of training pairs are needed nowhere else, so a job
computes them on demand; else they are None.
"""

from dataclasses import dataclass, replace
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from assets.execution.merge_adapter import base_of
from assets.execution.rescore import rescore
from assets.lineage.history import History
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_page import render_page
from assets.views.pair_reader import PairReader, TokenizedRow, find_row
from training.contract.errors import PedigreeError, UsageError
from training.contract.files.arrow_rows import without_nulls
from training.contract.identity.fingerprint import short
from training.contract.store.store import Artifact
from workflows.commands.run import in_gpu_pool
from workflows.state.expected_state import expect_state


@dataclass(frozen=True)
class InspectedRow(TokenizedRow):
    """Log-probs of the policy are None where it was not evaluated on the pair and no score was asked for."""

    messages: dict[str, Any]


def inspect_row(
    pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, row: int, score: bool = False
) -> InspectedRow:
    """Row `row` of the `raw_preferences` that were tokenized; with `score`, unknown log-probs of the policy are computed.

    The tokens are those that a run would use now, if they were made, by a plan for example; else those of the latest run.
    Raises UsageError if the row is not there, or was dropped, or nothing was tokenized.
    """
    history = History(instance, pipeline, services.store)
    pairs = _tokens_of_now(pipeline, services) or _latest_tokens(history)
    raw = services.store.open("raw_preferences", pairs.derivation.inputs["raw_preferences"].fingerprint)
    table = pq.read_table(raw.file("preferences.parquet"))
    messages = without_nulls(_row(table, row))
    if messages is None:
        raise UsageError(
            f"there is no row {row} in raw_preferences {short(raw.fingerprint)}; its {len(table):,} rows are numbered from 0"
        )
    logprobs = _table_of(pairs, history)
    reader = PairReader(services.store, pairs, logprobs)
    tokens = reader.read(row)
    if tokens is None:
        raise UsageError(f"row {row} has no tokens: it was dropped when the pairs were tokenized")
    policy = _evaluated(row, reader.keys(row), history)
    if policy is None and score:
        to_score = _scoring_inputs(row, pairs, logprobs, history)
        found = in_gpu_pool("inspect", services, instance, lambda: rescore(pipeline, services, to_score, [row]))
        policy = found.rows[0]["chosen"]["live"], found.rows[0]["rejected"]["live"]
    chosen, rejected = policy or (None, None)
    return InspectedRow(
        row,
        tokens.split,
        replace(tokens.chosen, policy_logprob=chosen),
        replace(tokens.rejected, policy_logprob=rejected),
        messages,
    )


def _tokens_of_now(pipeline: Pipeline, services: Services) -> Artifact | None:
    """The pairs that a run would use, if they are in the store; None if its inputs cannot be looked at any more."""
    try:
        how = expect_state(pipeline, services)["tokenized_pairs"].derivation
        return None if how is None else services.store.find("tokenized_pairs", how.key)
    except PedigreeError:
        return None


def _latest_tokens(history: History) -> Artifact:
    pairs = history.artifact("tokenized_pairs")
    return replace(pairs, derivation=history.derivation("tokenized_pairs", pairs.fingerprint))


def inspection_page(pipeline: Pipeline, found: InspectedRow) -> str:
    """The row as a self-contained HTML page."""
    return render_page(f"{pipeline.name}: row {found.row}", [found])


def _table_of(pairs: Artifact, history: History) -> Artifact | None:
    """The table of log-probs, unless it belongs to other pairs, as it may after a run that ended early."""
    table = history.find("reference_logprobs")
    if table is None:
        return None
    how = history.derivation("reference_logprobs", table.fingerprint)
    return table if how.inputs["tokenized_pairs"].fingerprint == pairs.fingerprint else None


def _evaluated(row: int, keys: tuple[str, str] | None, history: History) -> tuple[float, float] | None:
    """The latest policy's log-probs of the pair, unless the evaluation is of another policy, or of other tokens of the row."""
    evaluation = history.find("evaluation")
    if evaluation is None or _evaluated_policy(evaluation, history) != history.latest("policy").fingerprint:
        return None
    found = _row(pq.read_table(evaluation.file("pairs.parquet")), row)
    if found is None or (found["chosen_key"], found["rejected_key"]) != keys:
        return None
    return found["policy_chosen_logprob"], found["policy_rejected_logprob"]


def _evaluated_policy(evaluation: Artifact, history: History) -> str:
    return history.derivation("evaluation", evaluation.fingerprint).inputs["policy"].fingerprint


def _scoring_inputs(row: int, pairs: Artifact, logprobs: Artifact | None, history: History) -> dict[str, Artifact]:
    policy = history.artifact("policy")
    if logprobs is None:
        name = history.pipeline.name
        raise UsageError(
            f"{name}/reference_logprobs is of other pairs than {name}/tokenized_pairs {short(pairs.fingerprint)}, so "
            f"row {row} cannot be scored; run `pedigree run {history.pipeline.argument}` first"
        )
    inputs = {"tokenized_pairs": pairs, "reference_logprobs": logprobs, "policy": policy}
    base = base_of(policy, history.store)
    return inputs if base is None else {**inputs, "reference_model": base}


def _row(table: pa.Table, row: int) -> dict[str, Any] | None:
    index = find_row(table, row)
    return None if index is None else table.slice(index, 1).to_pylist()[0]
