"""A cache of Arrow rows by key. A shard is written once:

    index.safetensors     keys    uint8[S, K]     the key of each row
                          starts  int64[B + 1]    the first row of each record batch, then the number of rows
    rows.arrow            record batches, compressed with LZ4, in the order of their keys

Rows are read a record batch at a time, so memory use does not grow with a cache.

Legend: S rows of a shard, B its record batches, Q requested keys, K bytes of a key.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import save_file

from training.contract.errors import CorruptArtifact, StoreError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.fingerprint import fingerprint_of_stream
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation, verify_contents
from training.contract.store.shard_cache import Keys, Rows, ShardCache, ShardDetails, read_arrays
from training.contract.system.atomic_io import write_error

KEY_BYTES = 16
_INDEX, _ROWS = "index.safetensors", "rows.arrow"
_FORMAT = "1"
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
_BATCHES_IN_MEMORY = 16
COMMIT_SECONDS = 30.0
_COMMIT_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class RowShard:
    """An open shard; the keys are memory-mapped."""

    artifact: Artifact[ShardDetails]
    keys_SK: Keys
    starts_B: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys_SK)

    @cached_property
    def reader(self) -> pa.RecordBatchFileReader:
        """The file of rows. Raises CorruptArtifact, UnreadableArtifact."""
        verify_contents(self.artifact.folder, self.artifact.manifest, [_ROWS])
        try:
            # Not mapped: the batches are compressed, and touched pages of a map would count as memory of this process.
            return pa.ipc.open_file(pa.OSFile(str(self.artifact.folder / _ROWS)))
        except (OSError, pa.ArrowInvalid) as error:
            raise CorruptArtifact(
                f"{self.artifact.folder / _ROWS} does not hold rows: {error}", "corrupt-shard"
            ) from error

    def take(self, rows: Rows) -> list[pa.RecordBatch]:
        """Return these rows, in their order, in parts. Raises CorruptArtifact, UnreadableArtifact."""
        batches = np.searchsorted(self.starts_B, rows, side="right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(rows)]
        parts = []
        for begin, end in pairwise(bounds):
            number = int(batches[begin])
            parts.append(_read_batch(self, number).take(pa.array(rows[begin:end] - self.starts_B[number])))
        return parts


@lru_cache(_BATCHES_IN_MEMORY)
def _read_batch(shard: RowShard, number: int) -> pa.RecordBatch:
    return shard.reader.get_batch(number)


class RowCache(ShardCache[RowShard]):
    """All cached rows of `rule`. A subclass has the columns, as `schema`."""

    schema: ClassVar[pa.Schema]

    def open_shard(self, artifact: Artifact[ShardDetails]) -> RowShard:
        verify_contents(artifact.folder, artifact.manifest, [_INDEX])
        path = artifact.folder / _INDEX
        arrays = read_arrays(path, {"keys": np.uint8, "starts": np.int64})
        if arrays["keys"].shape != (int(arrays["starts"][-1]), KEY_BYTES):
            shapes = {name: array.shape for name, array in arrays.items()}
            raise CorruptArtifact(f"{path} has arrays of shapes {shapes}", "corrupt-shard")
        return RowShard(artifact, arrays["keys"], arrays["starts"])

    def identities(self, shard: RowShard) -> Keys:
        """Return the identity in `raw_preferences` of each row of a shard."""
        return shard.keys_SK

    def shards_in_use(self, identities_QK: Keys) -> set[str]:
        """Return the fingerprints of the shards with at least half of their rows among these identities."""
        self._refresh()
        wanted, in_use = _as_items(identities_QK), set()
        for name, shard in self._shards.items():
            with suppress(StoreError):  # a corrupt shard is not in use
                if np.isin(_as_items(self.identities(shard)), wanted).sum() * 2 >= len(shard):
                    in_use.add(name)
        return in_use

    def lookup(self, keys_QK: Keys) -> npt.NDArray[np.bool_]:
        """Return bool[Q]: whether each key is in the cache, also in new shards of other processes."""
        self._refresh()
        found_Q = np.zeros(len(keys_QK), np.bool_)
        for _, _, positions in self._find(keys_QK):
            found_Q[positions] = True
        return found_Q

    def rows(self, keys_QK: Keys) -> pa.Table | None:
        """Return the row of each key, in order; None if one is missing, also because its shard turned out to be corrupt."""
        self._refresh()
        parts, positions_Q = [], [np.zeros(0, np.int64)]
        for shard, rows, positions in self._find(keys_QK):
            order = np.argsort(rows, kind="stable")
            try:
                parts += shard.take(rows[order])
            except StoreError as error:
                self._drop(shard, error)
                return None
            positions_Q.append(positions[order])
        order_Q = np.concatenate(positions_Q)
        if len(order_Q) < len(keys_QK):
            return None
        table = pa.Table.from_batches(parts, self.schema)
        back_Q = np.empty_like(order_Q)
        back_Q[order_Q] = np.arange(len(order_Q))
        return table if (np.diff(order_Q) == 1).all() else table.take(pa.array(back_Q))

    def add(self, keys_SK: Keys, batches: list[pa.RecordBatch]) -> Artifact[ShardDetails]:
        """Publish rows as one shard. Raises StoreError."""
        assert keys_SK.shape == (sum(map(len, batches)), KEY_BYTES), f"keys of shape {keys_SK.shape}"
        with self.store.staging() as staging:
            identity = self._write(staging, keys_SK, batches)
            details = ShardDetails(rows=len(keys_SK), software=dict(self.software))
            derivation = Derivation(kind=self.kind, code_version=_FORMAT, inputs={}, settings={"shard": identity})
            return self.store.publish(staging, derivation, JobResult(identity, details)).of_kind(self.artifact_kind)

    def _write(self, folder: Path, keys_SK: Keys, batches: list[pa.RecordBatch]) -> str:
        starts_B = np.cumsum([0, *map(len, batches)], dtype=np.int64)
        try:
            path = str(folder / _ROWS)
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, self.schema, options=_LZ4) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            save_file({"keys": np.ascontiguousarray(keys_SK), "starts": starts_B}, folder / _INDEX)
        except SafetensorError as error:
            raise write_error("write a shard", folder, error) from error
        return fingerprint_of_stream(self.kind, [keys_SK.tobytes(), hash_file(folder / _ROWS).encode()])


class PairCache(RowCache):
    """The pairs of rows of data files, by the content of the row (data/reading/converted_pairs.py)."""

    name, title, again = "pairs", "pair cache", "convert its rows again"
    schema = pa.schema(
        [
            *((part, pa.binary()) for part in ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")),
            ("prompt_digest", pa.binary(32)),
            ("identity", pa.string()),
            ("opposite", pa.binary(16)),
        ]
    )

    def identities(self, shard: RowShard) -> Keys:
        batches = (shard.reader.get_batch(number) for number in range(shard.reader.num_record_batches))
        return keys_of([identity for batch in batches for identity in batch.column("identity").to_pylist()])


class TokenCache(RowCache):
    """The tokens of pairs, by the pair's identity (data/tokenization/token_rows.py)."""

    name, title, again = "tokens", "token cache", "tokenize its rows again"
    schema = pa.schema(
        [
            *((name, pa.list_(pa.int32())) for name in ("prompt", "chosen", "rejected")),
            *((name, pa.list_(pa.bool_())) for name in ("chosen_mask", "rejected_mask")),
            *((name, pa.binary(32)) for name in ("chosen_key", "rejected_key", "prompt_key")),
            ("reason", pa.string()),
            ("detail", pa.string()),
        ]
    )


@dataclass
class NewShard:
    """Collects new rows and commits them as a shard, after many bytes or `COMMIT_SECONDS`."""

    cache: RowCache
    _keys: list[Keys] = field(default_factory=list)
    _batches: list[pa.RecordBatch] = field(default_factory=list)
    _bytes: int = 0
    _committed: float = field(default_factory=time.monotonic)

    def add(self, keys: Keys, batch: pa.RecordBatch) -> None:
        self._keys.append(keys)
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= _COMMIT_BYTES or time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        if self._batches:
            self.cache.add(np.concatenate(self._keys), self._batches)
        self._keys, self._batches, self._bytes, self._committed = [], [], 0, time.monotonic()


def keys_of(identities: list[str]) -> Keys:
    """Return the keys of rows with these identities, in hexadecimal."""
    return np.frombuffer(bytes.fromhex("".join(identities)), np.uint8).reshape(-1, KEY_BYTES)


def _as_items(keys_SK: Keys) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(keys_SK).view(np.dtype((np.void, KEY_BYTES)))[:, 0]
