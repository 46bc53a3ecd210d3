"""Read tokenized pairs from an Arrow stream on disk, which is mapped into memory.

    row              int64            row of `preferences.parquet`
    split            string           "train" or "validation"
    prompt_length    int32            tokens of the prompt; both sequences begin with them
    chosen_ids       list<int32>      prompt + response;      rejected_ids the same
    chosen_mask      list<bool>       the trained tokens;     rejected_mask the same
    chosen_key       fixed_size_binary[32]   identity of (ids, mask);   rejected_key the same

The file is a plain Arrow IPC stream, so `datasets.Dataset.from_file` opens it too. Tokens and masks are read per sequence;
columns with one number per pair are read completely.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from training.contract.errors import DataError, TemplateError
from training.contract.identity.fingerprint import KEY_BYTES
from training.model.attention.shared_prefix import TokenSequence

Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")
Number = TypeVar("Number", bound=np.generic)
PAIRS_FILE = "pairs.arrow"
PAIRS_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("split", pa.string()),
        ("prompt_length", pa.int32()),
        ("chosen_ids", pa.list_(pa.int32())),
        ("rejected_ids", pa.list_(pa.int32())),
        ("chosen_mask", pa.list_(pa.bool_())),
        ("rejected_mask", pa.list_(pa.bool_())),
        ("chosen_key", pa.binary(KEY_BYTES)),
        ("rejected_key", pa.binary(KEY_BYTES)),
    ]
)


def by_pair(values_2P: NDArray[Number]) -> NDArray[Number]:
    """Reshape values of all chosen, then all rejected responses (2P) to one row per pair (P x 2)."""
    return np.stack(np.split(values_2P, 2), axis=1)


class Pairs:
    """The pairs of a `tokenized_pairs` artifact, by position from 0 to len - 1."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.prompt_lengths: NDArray[np.int32] = _as_numpy(table.column("prompt_length"))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map the pairs in `folder`. Raise DataError if the file is missing or has other columns."""
        path = folder / PAIRS_FILE
        try:
            with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
                table = stream.read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(
                f"{path} does not hold tokenized pairs ({error}); materialize tokenized_pairs", "not-tokenized-pairs"
            ) from error
        if not table.schema.equals(PAIRS_SCHEMA):
            raise DataError(
                f"{path} has the columns {table.schema.names}, expected {PAIRS_SCHEMA.names}; materialize tokenized_pairs",
                "not-tokenized-pairs",
            )
        return cls(table)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row in `preferences.parquet` of each pair."""
        return _as_numpy(self._table.column("row"))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(int(self.lengths(side).max(initial=0)) for side in SIDES)

    @property
    def largest_token(self) -> int:
        return max(pc.max(pc.list_flatten(self._table.column(f"{side}_ids"))).as_py() or 0 for side in SIDES)

    def check_known_tokens(self, vocabulary: int) -> None:
        """Raise TemplateError if a token id is outside the `vocabulary`, the number of a model's embeddings."""
        if (largest := self.largest_token) >= vocabulary:
            raise TemplateError(
                f"the largest token id of the pairs is {largest:,}, but the model has embeddings for {vocabulary:,}: resize "
                "the embeddings of the model and save it again, or use the tokenizer that the model was trained with",
                "token-outside-vocabulary",
            )

    def batches(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """Yield these columns of all pairs, some pairs at a time."""
        yield from self._table.select(columns).to_batches()

    def indices(self, split: str) -> NDArray[np.int64]:
        """Return the positions of the pairs in a split, ascending."""
        # Compare numbers: comparing with a Python string would import pandas (see _as_numpy).
        splits = self._table.column("split").combine_chunks().dictionary_encode()
        names = splits.dictionary.to_pylist()
        return np.flatnonzero(_as_numpy(splits.indices) == (names.index(split) if split in names else -1))

    def sequence(self, index: int, side: Side) -> TokenSequence:
        ids = self._list(f"{side}_ids", index)
        mask = self._list(f"{side}_mask", index)
        return TokenSequence(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(np.bool_)))

    def prompt_ids(self, index: int) -> list[int]:
        return [int(token) for token in self._prompt(index)]

    def response_ids(self, index: int, side: Side = "chosen") -> list[int]:
        response = self._list(f"{side}_ids", index)[self.prompt_lengths[index] :]
        return [int(token) for token in response]

    def prompt_numbers(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for the prompt of each pair at `positions`. Equal prompts have equal numbers."""
        numbers: dict[bytes, int] = {}
        prompts = (self._prompt(int(position)).tobytes() for position in positions)
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)

    def lengths(self, side: Side) -> NDArray[np.int64]:
        """Return the tokens of each sequence, prompt included."""
        return _as_numpy(pc.list_value_length(self._table.column(f"{side}_ids"))).astype(np.int64)

    def trained_lengths(self, side: Side) -> NDArray[np.int64]:
        """Return the trained tokens of each sequence."""
        chunks = self._table.column(f"{side}_mask").chunks
        return np.concatenate([np.zeros(0, np.int64), *(_sums(chunk) for chunk in chunks)])

    def keys(self, side: Side) -> NDArray[np.uint8]:
        """Return the identity of each sequence: P x 32 bytes."""
        keys = b"".join(self._table.column(f"{side}_key").to_pylist())
        return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)

    def _prompt(self, index: int) -> NDArray[np.generic]:
        return self._list("chosen_ids", index)[: self.prompt_lengths[index]]

    def _list(self, column: str, index: int) -> NDArray[np.generic]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return _as_numpy(self._table.column(column)[int(index)].values)


def _sums(lists: pa.ListArray) -> NDArray[np.int64]:
    """Count the true values of each list of booleans."""
    return np.bincount(_as_numpy(pc.list_parent_indices(lists).filter(lists.flatten())), minlength=len(lists))


def _as_numpy(values: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Convert numbers or booleans without nulls.

    Arrow's own conversions to numpy and from Python import pandas: half a second and 30 MB per rank.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not pa.types.is_boolean(values.type):
        return np.from_dlpack(values)
    first, skipped = divmod(values.offset, 8)  # a byte holds eight booleans
    bits = np.unpackbits(
        np.frombuffer(values.buffers()[1], np.uint8, offset=first), count=skipped + len(values), bitorder="little"
    )
    return bits[skipped:].astype(np.bool_)
