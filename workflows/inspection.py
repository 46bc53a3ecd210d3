"""One row of a recipe's data, from the messages to the log-probs: what `pedigree inspect` shows."""

from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from assets.pipeline import Pipeline, Services
from assets.realize import data_version
from training.contract.errors import UsageError
from training.contract.fingerprint import short
from training.contract.store import Artifact

_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class InspectedSide:
    """A response: tokens of prompt and response as ids and as text, which are trained, and the log-probs in nats.

    `policy_logprob` is None for a pair outside the held-out split: only those are evaluated.
    """

    token_ids: list[int]
    texts: list[str]
    mask: list[bool]
    reference_logprob: float | None
    policy_logprob: float | None


@dataclass(frozen=True)
class InspectedRow:
    row: int
    split: str
    messages: dict[str, Any]
    chosen: InspectedSide
    rejected: InspectedSide


def inspect_row(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, row: int) -> InspectedRow:
    """Row `row` of `raw_preferences`. Raises UsageError where it is not there, was dropped, or nothing was materialized."""
    return _Reader(pipeline, services, instance).read(row)


class _Reader:
    def __init__(self, pipeline: Pipeline, services: Services, instance: dg.DagsterInstance):
        self._pipeline, self._store, self._instance = pipeline, services.store, instance

    def read(self, row: int) -> InspectedRow:
        raw = self._demanded("raw_preferences")
        messages = _row(pq.read_table(raw.file("preferences.parquet")), row)
        if messages is None:
            raise UsageError(f"there is no row {row} in raw_preferences {short(raw.fingerprint)}")
        pairs = self._demanded("tokenized_pairs")
        with pa.memory_map(str(pairs.file("pairs.arrow"))) as source:
            table = pa.ipc.open_stream(source).read_all()
            index = _index(table, row)
            if index is None:
                raise UsageError(f"row {row} has no tokens: it was dropped when the pairs were tokenized")
            tokens = table.slice(index, 1).to_pylist()[0]
        evaluated = self._evaluated(row)
        tokenizer = Tokenizer.from_file(str(pairs.file("tokenizer/tokenizer.json")))
        sides = {}
        for side in _SIDES:
            ids = tokens[f"{side}_ids"]
            sides[side] = InspectedSide(
                token_ids=ids,
                texts=[tokenizer.decode([token], skip_special_tokens=False) for token in ids],
                mask=tokens[f"{side}_mask"],
                reference_logprob=self._reference(index, side),
                policy_logprob=None if evaluated is None else evaluated[f"policy_{side}_logprob"],
            )
        return InspectedRow(row, tokens["split"], messages, sides["chosen"], sides["rejected"])

    def _reference(self, index: int, side: str) -> float | None:
        logprobs = self._materialized("reference_logprobs")
        if logprobs is None:
            return None
        return float(load_file(logprobs.file("logprobs.safetensors"))[f"{side}_logprobs"][index])

    def _evaluated(self, row: int) -> dict[str, Any] | None:
        evaluation = self._materialized("evaluation")
        return None if evaluation is None else _row(pq.read_table(evaluation.file("pairs.parquet")), row)

    def _demanded(self, asset: str) -> Artifact:
        artifact = self._materialized(asset)
        if artifact is None:
            name = self._pipeline.name
            raise UsageError(f"{name}/{asset} was never materialized; run `pedigree run {name}` first")
        return artifact

    def _materialized(self, asset: str) -> Artifact | None:
        found = data_version(self._instance, self._pipeline.key(asset))
        return None if found is None else self._store.open(asset, found)


def _row(table: pa.Table, row: int) -> dict[str, Any] | None:
    index = _index(table, row)
    return None if index is None else table.slice(index, 1).to_pylist()[0]


def _index(table: pa.Table, row: int) -> int | None:
    found = pc.index(table["row"], row).as_py()
    return None if found < 0 else found
