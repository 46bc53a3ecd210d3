"""What is said in the pairs, for people to read: the messages of a few rows, as text.

Decoded tokens are harder to read: they lack the special tokens, and keep the names of roles that stand between these.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import PedigreeError
from training.contract.protocol.job import Job
from training.contract.store.manifest import read_manifest
from training.contract.store.store import Store
from training.data.reading.pair_writer import PREFERENCES_FILE

_SAID = ("reasoning_content", "content", "tool_calls")


@dataclass(frozen=True)
class PairText:
    """The messages of a pair as text."""

    prompt: str
    chosen: str
    rejected: str


def read_said(job: Job, rows: Collection[int]) -> dict[int, PairText]:
    """Return what is said in these `rows` of `raw_preferences`, from which the job's `tokenized_pairs` were made.

    The rows are found through the manifest of the pairs, so that an edit of the data that changes no token does not repeat the
    job. If they are gone, or cannot be read, return nothing: they are only for people to read.
    """
    try:
        file = _raw_preferences(job) / PREFERENCES_FILE
        table = pq.read_table(file, columns=["row", "prompt", "chosen", "rejected"], filters=[("row", "in", set(rows))])
    except (PedigreeError, OSError, KeyError, pa.ArrowException):
        return {}
    return {row["row"]: _said(row) for row in table.to_pylist()}


def _raw_preferences(job: Job) -> Path:
    if (given := job.inputs.get("raw_preferences")) is not None:
        return given.folder
    made_from = read_manifest(job.inputs["tokenized_pairs"].folder).made_from.inputs["raw_preferences"]
    return Store(job.store).open("raw_preferences", made_from.fingerprint, hashes=False).folder


def _said(row: Mapping[str, Any]) -> PairText:
    prompt = "\n".join(f"{turn['role']}: {_text(turn)}" for turn in row["prompt"])
    return PairText(prompt, _answer(row["chosen"]), _answer(row["rejected"]))


def _answer(turns: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the response; each message has its role if there are several, as with calls of tools."""
    if len(turns) == 1:
        return _text(turns[0])
    return "\n".join(f"{turn['role']}: {_text(turn)}" for turn in turns)


def _text(turn: Mapping[str, Any]) -> str:
    return " ".join(turn[part] for part in _SAID if turn.get(part))
