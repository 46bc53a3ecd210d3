"""Metrics of each held-out pair in an evaluation. The gate and `pedigree compare` compare two policies by them.

A pair is identified by the tokens of its two sequences, because losses depend on tokens. Two evaluations share the pairs with
equal tokens; a duplicate counts once. After a change of template or tokenizer they share few pairs or none. Then pairs are
identified by their messages, and only the ranking of chosen over rejected is compared.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from assets.views.pair_reader import SIDES
from model_registry.gate.scores import GateMetric, Prompts, Values
from training.contract.config.json_object import JsonObject
from training.contract.config.loss import Loss
from training.contract.files.arrow_rows import without_nulls
from training.contract.identity.fingerprint import value_digest
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.settings import RecordedSettings
from training.contract.store.artifact import Artifact

Row = Mapping[str, Any]
_REFERENCE = AssetName.REFERENCE_MODEL
_ORIGIN = {"split", "source", "line", "source_name", "identity"}


def rows_by_pair(evaluation: Artifact, source: str | None = None) -> dict[str, Row]:
    """Return the rows of the evaluation's table by pair identity, optionally only rows of the sources named `source`."""
    rows = pq.read_table(evaluation.file("pairs.parquet")).to_pylist()
    selected = rows if source is None else [row for row in rows if row.get("source_name") == source]
    return {row["chosen_key"] + row["rejected_key"]: row for row in selected}


def rows_by_messages(evaluation: Artifact, raw_preferences: Artifact) -> dict[str, Row]:
    """Return the evaluation's rows by a digest of the pair's messages. It was made from `raw_preferences`."""
    rows = {row["row"]: row for row in pq.read_table(evaluation.file("pairs.parquet")).to_pylist()}
    columns = pq.read_schema(raw_preferences.file("preferences.parquet")).names
    pairs = _read_rows(rows, raw_preferences, [name for name in columns if name not in _ORIGIN])
    by_messages = {}
    for pair in pairs.to_pylist():
        row = rows[pair.pop("row")]  # only the messages remain in the pair
        by_messages[value_digest(without_nulls(pair)).hex()] = row
    return by_messages


def prompts(rows: Mapping[str, Row], raw_preferences: Artifact) -> Prompts:
    """Return a digest of each row's prompt messages, by the names of `rows`."""
    messages_by_pair = prompt_messages(rows, raw_preferences)
    return {pair: value_digest(without_nulls(messages)).hex() for pair, messages in messages_by_pair.items()}


def prompt_messages(rows: Mapping[str, Row], raw_preferences: Artifact) -> dict[str, list[JsonObject]]:
    """Return the prompts of `rows` from `raw_preferences`, by the names of `rows`."""
    table = _read_rows([row["row"] for row in rows.values()], raw_preferences, ["row", "prompt"])
    messages = {pair["row"]: pair["prompt"] for pair in table.to_pylist()}
    return {pair: messages[row["row"]] for pair, row in rows.items()}


def _read_rows(rows: Iterable[int], raw_preferences: Artifact, columns: list[str]) -> pa.Table:
    table = pq.read_table(raw_preferences.file("preferences.parquet"), columns=columns)
    return table.filter(pc.is_in(table["row"], pa.array(rows, pa.int64())))


def loss(row: Row) -> float:
    return float(row["loss"])


def accuracy(row: Row, other: Row | None = None) -> float:
    """Return 1 if the policy prefers the chosen response more than the reference does, else 0; `other` as in `margin`.

    Under losses with a reference, the rewards give the same ranking. Under losses without one, rewards rank many pairs
    correctly before any training, so they cannot be compared across losses.
    """
    return float(margin(row, other) > 0)


def margin(row: Row, other: Row | None = None) -> float:
    """Return the log-ratio (policy over reference) of the chosen response minus the rejected one's, in nats.

    If the loss has a reference, it is the margin of rewards divided by beta. So it is comparable across betas and losses with
    the same reference. `other`: the same pair's row in another evaluation, to use its reference log-probs.
    """
    reference = row if other is None else other
    chosen, rejected = (row[f"policy_{side}_logprob"] - reference[f"reference_{side}_logprob"] for side in SIDES)
    return float(chosen - rejected)


def logistic_loss(row: Row) -> float:
    """Return -log sigmoid of the reward margin, the loss of DPO. It does not depend on other pairs."""
    margin = float(row["margin"])
    return math.log1p(math.exp(-abs(margin))) + max(0.0, -margin)


def scale(evaluation: Artifact, is_by_prompt: bool = False) -> dict[str, str]:
    """Return the inputs of its losses besides the policy. Losses of two evaluations are comparable only if these are equal.

    They are the loss settings, the reference if the loss needs it, and the pairs if a pair's loss depends on the batch. The
    field `weighting` is left out: it applies to training pairs only. `is_by_prompt` as in `common_measure`.
    """
    loss = _recorded_loss(evaluation).model_copy(update={"weighting": None})
    is_used = {
        _REFERENCE: loss.needs_reference or (is_by_prompt and loss.depends_on_batch),
        AssetName.TOKENIZED_PAIRS: loss.depends_on_batch and not is_by_prompt,
    }
    inputs = evaluation.derivation.inputs
    return {"loss": loss.model_dump_json(), **{kind: inputs[kind].fingerprint for kind in is_used if is_used[kind]}}


def _recorded_loss(evaluation: Artifact) -> Loss:
    return RecordedSettings.model_validate(evaluation.derivation.settings).loss


def common_measure(evaluation: Artifact, champion: Artifact, is_by_prompt: bool = False) -> GateMetric:
    """Return the measure for two evaluations of pairs with the same tokens.

    It is the loss if both have the same scale, else the error rate. With `is_by_prompt`, a pair's value must not depend on
    other pairs. Then it is the logistic loss of the margin instead of a loss that couples the pairs of a batch.

    If the references differ, both error rates are over the champion's reference: a candidate with a bad reference would
    otherwise look better than it is.
    """
    if scale(evaluation, is_by_prompt) == scale(champion, is_by_prompt):
        is_coupled = is_by_prompt and _recorded_loss(evaluation).depends_on_batch
        return GateMetric.LOGISTIC_LOSS if is_coupled else GateMetric.LOSS
    reference, champions_reference = (
        artifact.derivation.inputs[_REFERENCE].fingerprint for artifact in (evaluation, champion)
    )
    is_same = reference == champions_reference
    return GateMetric.ERROR_RATE if is_same else GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE


def measure_pairs(measure: GateMetric, rows: Mapping[str, Row], champion: Mapping[str, Row]) -> Values:
    """Return the compared value of each of `rows`; lower is better. `champion`: the champion's rows, by the same names."""
    match measure:
        case GateMetric.LOSS:
            return {pair: loss(row) for pair, row in rows.items()}
        case GateMetric.LOGISTIC_LOSS:
            return {pair: logistic_loss(row) for pair, row in rows.items()}
        case GateMetric.ERROR_RATE:
            return {pair: 1.0 - accuracy(row) for pair, row in rows.items()}
        case GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE:
            return {pair: 1.0 - accuracy(row, champion.get(pair)) for pair, row in rows.items()}
