"""Reuse tokens from other versions of the libraries, if a sample gives the same tokens.

The sample has `COMPARED` pairs, evenly spread over the lengths, and some dropped pairs. An upgrade of transformers or
tokenizers rarely changes a token, but tokenizing a million pairs takes hours.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from training.contract.errors import CorruptArtifact, CorruptRecord
from training.contract.identity.fingerprint import short
from training.contract.identity.software import COMPARED
from training.contract.protocol.artifacts import TOKENIZED_PAIRS, AssetName
from training.contract.protocol.details import PairsDetails
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.protocol.locations import PairsLocations
from training.contract.protocol.settings import PairsSettings
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.store import Store
from training.data.reading.pair_writer import PREFERENCES_FILE
from training.data.tokenization.pair_dataset import SIDES, Pairs, Side
from training.data.tokenization.tokenize_pair import PairEncoder
from training.data.tokenization.tokenizer_pool import encode_batches

_DROPPED = 8


def made_before(
    job: Job[PairsSettings, PairsLocations], encoder: PairEncoder, events: EventWriter
) -> JobResult[PairsDetails] | None:
    """Return the earlier pairs of other software from the same inputs, if `encoder` gives the same tokens; else None."""
    if not job.settings.software:
        return None
    derivation = job.derivation.of_any_software
    try:
        earlier = Store(job.store).find(TOKENIZED_PAIRS, derivation.key)
    except (CorruptArtifact, CorruptRecord):  # tokenizing all pairs again replaces it
        return None
    if earlier is None:
        return None
    events.phase("comparing with tokens that other versions of the libraries made")
    count, difference = _compare_sample(job, encoder, earlier)
    if difference is None:
        events.note(f"{count:,} pairs have the tokens of other versions of the libraries: all are used again")
        return JobResult(earlier.fingerprint, earlier.details, is_known=True)
    events.note(
        f"these versions of the libraries give other tokens than {short(earlier.fingerprint)}, which other versions made: "
        f"{difference}; all pairs are tokenized again"
    )
    return None


def _compare_sample(job: Job, encoder: PairEncoder, earlier: Artifact[PairsDetails]) -> tuple[int, str | None]:
    """Return the number of compared pairs, and a description of the first difference."""
    pairs = Pairs.open(earlier.folder)
    positions = {int(pairs.rows[at]): at for at in _sample_positions(pairs)}
    dropped = {drop.row for drop in earlier.details.dropped_examples[:_DROPPED]}
    rows = list(_rows(job, {*positions, *dropped}))
    for batch, tokens in encode_batches(encoder, [rows], len(rows)):
        for row, now in zip(batch, tokens.to_pylist(), strict=True):
            number, origin = row["row"], f"row {row['row']} ({row['source']}, line {row['line']})"
            is_dropped = now["reason"] is not None
            if is_dropped is not (number in dropped):
                return len(rows), f"{origin} is {'dropped' if is_dropped else 'used'} now"
            if not is_dropped and (side := _differing_side(pairs, positions[number], now)):
                return len(rows), f"the {side} response of {origin}"
    return len(rows), None


def _differing_side(pairs: Pairs, position: int, now: Mapping[str, Any]) -> Side | None:
    """Return the first side whose ids or mask differ from the pair at `position`."""
    return next((side for side in SIDES if pairs.keys(side)[position].tobytes() != now[f"{side}_key"]), None)


def _sample_positions(pairs: Pairs) -> list[int]:
    """Return the positions of at most `COMPARED` pairs, evenly spread over the lengths of the longer response."""
    order = np.argsort(np.maximum(*(pairs.lengths(side) for side in SIDES)), kind="stable")
    at = np.linspace(0, len(order) - 1, min(COMPARED, len(order))).round().astype(np.int64)
    return [int(position) for position in order[at]]


def _rows(job: Job, numbers: set[int]) -> Iterator[Mapping[str, Any]]:
    source = job.inputs[AssetName.RAW_PREFERENCES].folder / PREFERENCES_FILE
    yield from pq.read_table(source, filters=[("row", "in", sorted(numbers))]).to_pylist()
