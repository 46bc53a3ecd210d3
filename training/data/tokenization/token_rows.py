"""Tokenized pairs as Arrow rows: how workers return them and how the token cache keeps them.

    prompt, chosen, rejected          list<int32>     tokens; of the responses, without the prompt
    chosen_mask, rejected_mask        list<bool>      the trained tokens of the responses
    chosen_key, rejected_key          binary[32]      identity of (ids, mask), prompt included
    prompt_key                        binary[32]      identity of the prompt's tokens
    reason, detail                    string          why a pair is dropped; null for the others

A dropped pair has empty lists and keys of zeros.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from training.contract.identity.fingerprint import KEY_BYTES, fingerprint, sequence_key_of_parts
from training.contract.protocol.spec_files import TokenizationSpec
from training.contract.store.row_cache import TokenCache
from training.data.tokenization.encoded_pair import Dropped, EncodedPair
from training.data.tokenization.pair_dataset import PAIRS_SCHEMA, SIDES

_LISTS = ("prompt", "chosen", "rejected", "chosen_mask", "rejected_mask")
_KEYS = ("chosen_key", "rejected_key", "prompt_key")
TOKEN_ROWS = TokenCache.schema
_NO_KEY = bytes(KEY_BYTES)
_RULE_FIELDS = {
    *("train_on", "max_length", "over_length", "template", "template_kwargs", "date", "end_of_turn"),
    *("tokenizer_fingerprint", "template_fingerprint"),
}


def token_rule(spec: TokenizationSpec, code_version: str, software: Mapping[str, str]) -> str:
    """Return the fingerprint of all that the tokens of a row depend on, except its text."""
    rule = spec.model_dump(include=_RULE_FIELDS) | {"code_version": code_version, "software": dict(software)}
    return fingerprint("token_rule", rule)


def to_rows(outcomes: Sequence[EncodedPair | Dropped]) -> pa.RecordBatch:
    """Return one row per pair, in order."""
    lists: dict[str, list[NDArray[Any]]] = {name: [] for name in _LISTS}
    keys: dict[str, list[bytes]] = {name: [] for name in _KEYS}
    reasons: list[tuple[str, str] | tuple[None, None]] = []
    for outcome in outcomes:
        if isinstance(outcome, Dropped):
            row: dict[str, Any] = dict.fromkeys(_LISTS, np.zeros(0, np.int32)) | dict.fromkeys(_KEYS, _NO_KEY)
            reasons.append((outcome.reason.value, outcome.detail))
        else:
            row = _row_of(outcome)
            reasons.append((None, None))
        for name, values in lists.items():
            values.append(row[name])
        for name, column in keys.items():
            column.append(row[name])
    arrays = [_list_array(lists[name], TOKEN_ROWS.field(name).type.value_type) for name in _LISTS]
    arrays += [pa.array(keys[name], TOKEN_ROWS.field(name).type) for name in _KEYS]
    arrays += [pa.array([reason[part] for reason in reasons], pa.string()) for part in (0, 1)]
    return pa.RecordBatch.from_arrays(arrays, schema=TOKEN_ROWS)


def pair_lines(table: pa.Table, rows: pa.ChunkedArray, splits: pa.ChunkedArray) -> pa.RecordBatch:
    """Return lines of PAIRS_SCHEMA for the rows in `table`, none of them dropped, with their row numbers and splits."""
    columns = {name: _lists(table.column(name)) for name in _LISTS}
    prompts = columns["prompt"]
    arrays: dict[str, pa.Array] = {
        "row": rows.combine_chunks(),
        "split": splits.combine_chunks(),
        "prompt_length": pa.array([len(prompt) for prompt in prompts], pa.int32()),
    }
    for side in SIDES:
        ids = [part for pair in zip(prompts, columns[side], strict=True) for part in pair]
        arrays[f"{side}_ids"] = _list_array(ids, pa.int32(), of_two=True)
        masks = [
            part
            for prompt, mask in zip(prompts, columns[f"{side}_mask"], strict=True)
            for part in (np.zeros(len(prompt), np.bool_), mask)
        ]
        arrays[f"{side}_mask"] = _list_array(masks, pa.bool_(), of_two=True)
        arrays[f"{side}_key"] = table.column(f"{side}_key").combine_chunks()
    return pa.RecordBatch.from_arrays([arrays[name] for name in PAIRS_SCHEMA.names], schema=PAIRS_SCHEMA)


def _row_of(pair: EncodedPair) -> dict[str, Any]:
    prompt = np.array(pair.prompt, np.int32)
    row: dict[str, Any] = {"prompt": prompt, "prompt_key": hashlib.sha256(prompt.data).digest()}
    for side, response in zip(SIDES, (pair.chosen, pair.rejected), strict=True):
        ids, mask = np.array(response.ids, np.int32), np.array(response.mask, np.bool_)
        key = sequence_key_of_parts(len(prompt) + len(ids), prompt.data, ids.data, bytes(len(prompt)), mask.data)
        row |= {side: ids, f"{side}_mask": mask, f"{side}_key": key}
    return row


def _list_array(values: Sequence[NDArray[Any]], kind: pa.DataType, of_two: bool = False) -> pa.ListArray:
    """Return a list array with one list per array, or per two neighbours."""
    lengths = np.array([len(part) for part in values], np.int64)
    if of_two:
        lengths = lengths.reshape(-1, 2).sum(axis=1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate(values) if values else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat).cast(kind))


def _lists(column: pa.ChunkedArray) -> list[NDArray[Any]]:
    """Return the lists of a column as arrays that share its memory, if they are numbers."""
    return [part for chunk in column.chunks for part in _split(chunk)]


def _split(chunk: pa.ListArray) -> Iterator[NDArray[Any]]:
    flat = chunk.flatten()
    values = np.from_dlpack(flat) if pa.types.is_integer(flat.type) else flat.to_numpy(zero_copy_only=False)
    lengths = np.from_dlpack(chunk.value_lengths())
    return iter(np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else [])
