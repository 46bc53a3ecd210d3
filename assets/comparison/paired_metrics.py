"""What an evaluation says of each held-out pair: the gate and `pedigree compare` compare two policies by it.

A pair is identified by the tokens of its two sequences, since its loss is one of tokens. So two evaluations share the pairs
whose tokens are the same, and a pair that is in the data twice counts once. After another template or tokenizer there is none,
or few. Whether a pair is ranked rightly can still be compared then: there it is identified by its messages.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from assets.views.pair_reader import SIDES
from model_registry.gate import Measure, Prompts, Values
from training.contract.config.loss import Loss
from training.contract.files.arrow_rows import without_nulls
from training.contract.identity.fingerprint import value_digest
from training.contract.store.store import Artifact

Row = Mapping[str, Any]
_REFERENCE = "reference_model"
_ORIGIN = {"split", "source", "line", "source_name", "identity"}


def rows_by_pair(evaluation: Artifact, source: str | None = None) -> dict[str, Row]:
    """The rows of the evaluation's table, by the pair's identity; with `source`, those of the sources of that name."""
    rows = pq.read_table(evaluation.file("pairs.parquet")).to_pylist()
    wanted = rows if source is None else [row for row in rows if row.get("source_name") == source]
    return {row["chosen_key"] + row["rejected_key"]: row for row in wanted}


def rows_by_messages(evaluation: Artifact, raw_preferences: Artifact) -> dict[str, Row]:
    """The rows by what is said in the pair: `raw_preferences` are those that the evaluation was made from."""
    rows = {row["row"]: row for row in pq.read_table(evaluation.file("pairs.parquet")).to_pylist()}
    columns = pq.read_schema(raw_preferences.file("preferences.parquet")).names
    said = _said(rows, raw_preferences, [name for name in columns if name not in _ORIGIN])
    by_messages = {}
    for pair in said.to_pylist():
        row = rows[pair.pop("row")]  # what is left of the pair is what is said
        by_messages[value_digest(without_nulls(pair)).hex()] = row
    return by_messages


def prompts(rows: Mapping[str, Row], raw_preferences: Artifact) -> Prompts:
    """What is said in the prompts of `rows`, as a digest, by the same names."""
    said = prompt_messages(rows, raw_preferences)
    return {pair: value_digest(without_nulls(messages)).hex() for pair, messages in said.items()}


def prompt_messages(rows: Mapping[str, Row], raw_preferences: Artifact) -> dict[str, list[dict[str, Any]]]:
    """The prompts of `rows` as they are in `raw_preferences`, by the same names."""
    said = _said([row["row"] for row in rows.values()], raw_preferences, ["row", "prompt"])
    messages = {pair["row"]: pair["prompt"] for pair in said.to_pylist()}
    return {pair: messages[row["row"]] for pair, row in rows.items()}


def _said(rows: Iterable[int], raw_preferences: Artifact, columns: list[str]) -> pa.Table:
    said = pq.read_table(raw_preferences.file("preferences.parquet"), columns=columns)
    return said.filter(pc.is_in(said["row"], pa.array(rows, pa.int64())))


def loss(row: Row) -> float:
    return float(row["loss"])


def accuracy(row: Row, other: Row | None = None) -> float:
    """1 where the policy prefers the chosen response more than the reference does, else 0; `other` as in `margin`.

    That is what the rewards say under every loss that has a reference. Those of a loss that has none rank many pairs rightly
    before any training, so they cannot be compared with the former.
    """
    return float(margin(row, other) > 0)


def margin(row: Row, other: Row | None = None) -> float:
    """The log-ratio (policy over reference) of the chosen response minus that of the rejected one, in nats.

    Where the loss has a reference this is the reward's margin divided by beta. It is comparable under every beta and loss over
    the same reference: with `other`, that of the same pair in another evaluation.
    """
    reference = row if other is None else other
    chosen, rejected = (row[f"policy_{side}_logprob"] - reference[f"reference_{side}_logprob"] for side in SIDES)
    return float(chosen - rejected)


def scale(evaluation: Artifact) -> dict[str, str]:
    """What its losses depend on beside the policy: those of two evaluations can be compared only where this is equal.

    The settings of the loss, the reference if it needs one, and the pairs if a pair's loss depends on the others. Held-out
    pairs have no weights, so what weights a pair in training is none of the settings.
    """
    settings = Loss.model_validate({**evaluation.derivation.settings["loss"], "weighting": None})
    counts = {_REFERENCE: settings.needs_reference, "tokenized_pairs": settings.depends_on_batch}
    inputs = evaluation.derivation.inputs
    return {"loss": settings.model_dump_json(), **{kind: inputs[kind].fingerprint for kind in counts if counts[kind]}}


def common_measure(evaluation: Artifact, champion: Artifact) -> Measure:
    """What can be compared of two evaluations of pairs with the same tokens.

    Losses, if they are of one scale; else how pairs are ranked. Where the candidate has another reference than the champion,
    over the latter's: whoever ranks more pairs rightly than a bad reference is no better than the champion.
    """
    if scale(evaluation) == scale(champion):
        return Measure.LOSS
    ours, theirs = (each.derivation.inputs[_REFERENCE].fingerprint for each in (evaluation, champion))
    return Measure.ERROR_RATE if ours == theirs else Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE


def measured(measure: Measure, rows: Mapping[str, Row], champion: Mapping[str, Row]) -> Values:
    """What is compared of each of `rows`, the lower the better; `champion` are the champion's rows, by the same names."""
    match measure:
        case Measure.LOSS:
            return {pair: loss(row) for pair, row in rows.items()}
        case Measure.ERROR_RATE:
            return {pair: 1.0 - accuracy(row) for pair, row in rows.items()}
        case Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE:
            return {pair: 1.0 - accuracy(row, champion.get(pair)) for pair, row in rows.items()}
