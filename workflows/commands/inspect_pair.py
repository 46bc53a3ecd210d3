"""One row of a recipe's data, from the messages to the log-probs, for `pedigree inspect`.

The evaluation has the policy's log-probs of held-out pairs. Those of training pairs are computed by a job on demand; else they
are None.
"""

from dataclasses import dataclass, replace

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from assets.comparison.votes import check_exact
from assets.execution.merge_adapter import base_of
from assets.execution.rescore import rescore
from assets.lineage.history import History
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_page import render_page
from assets.views.pair_reader import HELD_OUT, PairReader, TokenizedRow, find_row
from training.contract.config.json_object import JsonObject
from training.contract.errors import PedigreeError, UsageError
from training.contract.files.arrow_rows import without_nulls
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import (
    EVALUATION,
    POLICY,
    RAW_PREFERENCES,
    REFERENCE_LOGPROBS,
    TOKENIZED_PAIRS,
    AssetName,
)
from training.contract.store.artifact import Artifact
from workflows.commands.run import in_gpu_pool
from workflows.state.expected_state import expect_state


@dataclass(frozen=True)
class InspectedRow(TokenizedRow):
    """One pair. The policy's log-probs are None if it was neither evaluated on the pair nor scored on demand."""

    messages: JsonObject


def inspect_row(
    pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, row: int, score: bool = False
) -> InspectedRow:
    """Return the row `row` of the tokenized `raw_preferences`. With `score`, compute missing log-probs of the policy.

    Prefer the tokens of a run now, which exist for example after a plan, to those from the latest run. Raises UsageError if
    the row is missing or was dropped, or nothing was tokenized, or the recipe hides held-out pairs and the row is one.
    """
    history = History(instance, pipeline, services.store)
    pairs = _current_tokens(pipeline, services) or _latest_tokens(history)
    raw = services.store.open(RAW_PREFERENCES, pairs.derivation.inputs[AssetName.RAW_PREFERENCES].fingerprint)
    table = pq.read_table(raw.file("preferences.parquet"))
    messages = without_nulls(_row(table, row))
    if messages is None:
        raise UsageError(
            f"raw_preferences {short(raw.fingerprint)} has no row {row}; its {len(table):,} rows are numbered from 0",
            "unknown-row",
        )
    logprobs = _table_of(pairs, history)
    reader = PairReader(services.store, pairs, logprobs)
    tokens = reader.read(row)
    if tokens is None:
        raise UsageError(f"row {row} has no tokens: it was dropped when the pairs were tokenized", "dropped-row")
    if tokens.split == HELD_OUT:
        check_exact(pipeline, f"row {row}, which is held out,")
    policy = _policy_logprobs(row, reader.keys(row), history)
    if policy is None and score:
        to_score = _scoring_inputs(row, pairs, logprobs, history)
        scores = in_gpu_pool("inspect", services, instance, lambda: rescore(pipeline, services, to_score, [row]))
        policy = scores.rows[0].chosen.live, scores.rows[0].rejected.live
    chosen, rejected = policy or (None, None)
    return InspectedRow(
        row,
        tokens.split,
        replace(tokens.chosen, policy_logprob=chosen),
        replace(tokens.rejected, policy_logprob=rejected),
        messages,
    )


def _current_tokens(pipeline: Pipeline, services: Services) -> Artifact | None:
    """Return the pairs of a run now, if they are in the store; None if its inputs cannot be read."""
    try:
        derivation = expect_state(pipeline, services)[AssetName.TOKENIZED_PAIRS].derivation
        return None if derivation is None else services.store.find(TOKENIZED_PAIRS, derivation.key)
    except PedigreeError:
        return None


def _latest_tokens(history: History) -> Artifact:
    pairs = history.artifact(TOKENIZED_PAIRS)
    return replace(pairs, derivation=history.derivation(AssetName.TOKENIZED_PAIRS, pairs.fingerprint))


def inspection_page(pipeline: Pipeline, found: InspectedRow) -> str:
    """Return the row as a self-contained HTML page."""
    return render_page(f"{pipeline.name}: row {found.row}", [found])


def _table_of(pairs: Artifact, history: History) -> Artifact | None:
    """Return the table of log-probs, or None if it belongs to other pairs, as after an incomplete run."""
    table = history.find(REFERENCE_LOGPROBS)
    if table is None:
        return None
    derivation = history.derivation(AssetName.REFERENCE_LOGPROBS, table.fingerprint)
    return table if derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint == pairs.fingerprint else None


def _policy_logprobs(row: int, keys: tuple[str, str] | None, history: History) -> tuple[float, float] | None:
    """Return the policy's log-probs of the pair; None if the evaluation is of another policy or of other tokens."""
    evaluation = history.find(EVALUATION)
    if evaluation is None or _evaluated_policy(evaluation, history) != history.latest(AssetName.POLICY).fingerprint:
        return None
    found = _row(pq.read_table(evaluation.file("pairs.parquet")), row)
    if found is None or (found["chosen_key"], found["rejected_key"]) != keys:
        return None
    return found["policy_chosen_logprob"], found["policy_rejected_logprob"]


def _evaluated_policy(evaluation: Artifact, history: History) -> str:
    return history.derivation(AssetName.EVALUATION, evaluation.fingerprint).inputs[AssetName.POLICY].fingerprint


def _scoring_inputs(row: int, pairs: Artifact, logprobs: Artifact | None, history: History) -> dict[str, Artifact]:
    policy = history.artifact(POLICY)
    if logprobs is None:
        name = history.pipeline.name
        raise UsageError(
            f"{name}/reference_logprobs is of other pairs than {name}/tokenized_pairs {short(pairs.fingerprint)}, so "
            f"row {row} cannot be scored; run `pedigree run {history.pipeline.argument}` first",
            "stale-logprobs",
        )
    inputs: dict[str, Artifact] = {
        AssetName.TOKENIZED_PAIRS: pairs,
        AssetName.REFERENCE_LOGPROBS: logprobs,
        AssetName.POLICY: policy,
    }
    base = base_of(policy, history.store)
    return inputs if base is None else {**inputs, AssetName.REFERENCE_MODEL: base}


def _row(table: pa.Table, row: int) -> JsonObject | None:
    index = find_row(table, row)
    return None if index is None else table.slice(index, 1).to_pylist()[0]
