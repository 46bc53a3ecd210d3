"""Read the messages of a few rows as text, for users.

Decoded tokens are harder to read: they lack special tokens, but keep the names of roles between them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import PedigreeError
from training.contract.protocol.artifacts import RAW_PREFERENCES, AssetName
from training.contract.protocol.job import Job
from training.contract.store.manifest import read_manifest
from training.contract.store.store import Store
from training.data.reading.pair_writer import PREFERENCES_FILE

_TEXT_FIELDS = ("reasoning_content", "content", "tool_calls")


@dataclass(frozen=True)
class PairText:
    """The messages of a pair as text."""

    prompt: str
    chosen: str
    rejected: str


def read_message_text(job: Job, rows: Collection[int]) -> dict[int, PairText]:
    """Return the texts of `rows` of the `raw_preferences` of the job's `tokenized_pairs`.

    The manifest of the pairs names the artifact, so that an edit of the data without another token does not repeat the job.
    Return an empty dict if the rows are missing or unreadable, since the texts are only for users.
    """
    try:
        file = _raw_preferences(job) / PREFERENCES_FILE
        table = pq.read_table(file, columns=["row", "prompt", "chosen", "rejected"], filters=[("row", "in", set(rows))])
    except (PedigreeError, OSError, KeyError, pa.ArrowException):
        return {}
    return {row["row"]: _pair_text(row) for row in table.to_pylist()}


def _raw_preferences(job: Job) -> Path:
    if (artifact := job.inputs.get(AssetName.RAW_PREFERENCES)) is not None:
        return artifact.folder
    pairs = read_manifest(job.inputs[AssetName.TOKENIZED_PAIRS].folder)
    raw_preferences = pairs.made_from.inputs[AssetName.RAW_PREFERENCES]
    return Store(job.store).open(RAW_PREFERENCES, raw_preferences.fingerprint, hashes=False).folder


def _pair_text(row: Mapping[str, Any]) -> PairText:
    prompt = "\n".join(f"{turn['role']}: {_text(turn)}" for turn in row["prompt"])
    return PairText(prompt, _response_text(row["chosen"]), _response_text(row["rejected"]))


def _response_text(turns: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the response. If it has several messages, each one has its role."""
    if len(turns) == 1:
        return _text(turns[0])
    return "\n".join(f"{turn['role']}: {_text(turn)}" for turn in turns)


def _text(turn: Mapping[str, Any]) -> str:
    return " ".join(turn[name] for name in _TEXT_FIELDS if turn.get(name))
