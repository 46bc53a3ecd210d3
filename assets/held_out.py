"""What an evaluation says of each held-out pair: the gate and `pedigree compare` compare two policies by it.

A pair is identified by the tokens of its two sequences, since its loss is one of tokens. So two evaluations share the pairs
whose tokens are the same, and a pair that is in the data twice counts once. After another template or tokenizer there is none.
Whether a pair is ranked rightly can still be compared then: there it is identified by its messages.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from assets.rows import SIDES
from training.contract.fingerprint import value_digest
from training.contract.loss import Loss
from training.contract.nulls import without_nulls
from training.contract.store import Artifact

Row = Mapping[str, Any]
_ORIGIN = {"split", "source", "line", "source_name"}


def rows_by_pair(evaluation: Artifact, source: str | None = None) -> dict[str, Row]:
    """The rows of the evaluation's table, by the pair's identity; with `source`, those of the sources of that name."""
    rows = pq.read_table(evaluation.file("pairs.parquet")).to_pylist()
    wanted = rows if source is None else [row for row in rows if row.get("source_name") == source]
    return {row["chosen_key"] + row["rejected_key"]: row for row in wanted}


def rows_by_messages(evaluation: Artifact, raw_preferences: Artifact) -> dict[str, Row]:
    """The same by what is said in the pair: `raw_preferences` are those that the evaluation was made from."""
    rows = {row["row"]: row for row in pq.read_table(evaluation.file("pairs.parquet")).to_pylist()}
    said = pq.read_table(raw_preferences.file("preferences.parquet"))
    said = said.select([name for name in said.column_names if name not in _ORIGIN])
    said = said.filter(pc.is_in(said["row"], pa.array(rows, pa.int64())))
    return {
        value_digest(without_nulls(pair)).hex(): rows[row] for pair in said.to_pylist() for row in [pair.pop("row")]
    }


def loss(row: Row) -> float:
    return float(row["loss"])


def accuracy(row: Row) -> float:
    """1 where the chosen response has the higher reward, else 0; comparable under every loss."""
    return float(row["margin"] > 0)


def margin(row: Row) -> float:
    """The log-ratio (policy over reference) of the chosen response minus that of the rejected one, in nats.

    This is the reward's margin divided by beta, so it is comparable under every beta and loss.
    """
    chosen, rejected = (row[f"policy_{side}_logprob"] - row[f"reference_{side}_logprob"] for side in SIDES)
    return float(chosen - rejected)


def scale(evaluation: Artifact) -> dict[str, str]:
    """What its losses depend on beside the policy: those of two evaluations can be compared only where this is equal.

    The settings of the loss, the reference, and the pairs if a pair's loss depends on the others.
    """
    settings = Loss.model_validate(evaluation.derivation.settings["loss"])
    kinds = ("reference_model", "tokenized_pairs") if settings.depends_on_batch else ("reference_model",)
    inputs = evaluation.derivation.inputs
    return {"loss": settings.model_dump_json(), **{kind: inputs[kind].fingerprint for kind in kinds}}
