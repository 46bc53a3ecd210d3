"""The tokens of all rows of `raw_preferences`, through the token cache."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from training.contract.errors import TrainingError
from training.contract.protocol.events import EventWriter, Progress
from training.contract.store.row_cache import NewShard, RowCache, keys_of
from training.contract.store.shard_cache import Keys
from training.contract.system.child_process import MemoryExceeded, run_in_child
from training.data.tokenization.tokenize_pair import PairEncoder
from training.data.tokenization.tokenizer_pool import Rows, encode_batches

_BATCH_ROWS = 256
_ORIGIN = ("row", "split", "source", "line", "identity")
_TRIES = 3


@dataclass
class CachedTokens:
    """The rows of a file with their tokens, one row group at a time."""

    path: Path  # of the Parquet file
    encoder: PairEncoder
    cache: RowCache
    events: EventWriter
    tokenized: int = 0
    cached: int = 0

    def __post_init__(self) -> None:
        self.source = pq.ParquetFile(self.path)

    def __len__(self) -> int:
        return int(self.source.metadata.num_rows)

    def fill(self, check: Callable[[Mapping[str, Any], str, str], None]) -> None:
        """Tokenize the rows that the cache lacks. `check` gets each dropped one, with reason and detail, and may raise."""
        missing = [self._missing_in(number) for number in range(self.source.num_row_groups)]
        count = sum(map(len, missing))
        self.cached = len(self) - count
        self.events.note(f"{len(self):,} rows: {self.cached:,} in the token cache, {count:,} to tokenize")
        self._encode(dict(enumerate(missing)), check)

    def groups(self) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield for each row group its columns of origin and its tokens."""
        for number in range(self.source.num_row_groups):
            group = self.source.read_row_group(number, columns=list(_ORIGIN))
            yield group, self._tokens_of(number, _keys_of(group))

    def remedy(self, number: int) -> str:
        """Return the advice for a row whose prompt is not a prefix; empty without one."""
        [row] = pq.read_table(self.path, filters=[("row", "==", number)]).to_pylist()
        try:
            switch = run_in_child(partial(self.encoder.remedy, row))
        except MemoryExceeded:
            return ""
        return f"; with `{switch}` in `tokenization.template_kwargs` they agree" if switch else ""

    def _tokens_of(self, group: int, keys: Keys) -> pa.Table:
        """Return the tokens of a row group. Make them again if their shard turns out to be corrupt."""
        for _ in range(_TRIES):
            if (table := self.cache.rows(keys)) is not None:
                return table
            self._encode({group: self._missing_in(group)}, lambda *_: None)
        raise TrainingError(
            f"the token cache in {self.cache.store.root} lost rows {_TRIES} times while they were read; check its disk and run "
            "again",
            "cache-shards-lost",
        )

    def _missing_in(self, group: int) -> NDArray[np.int64]:
        """Return the positions in a row group of the rows that the cache lacks."""
        keys = _keys_of(self.source.read_row_group(group, columns=["identity"]))
        return np.flatnonzero(~self.cache.lookup(keys))

    def _encode(
        self, missing: Mapping[int, NDArray[np.int64]], check: Callable[[Mapping[str, Any], str, str], None]
    ) -> None:
        """Tokenize rows into the cache: their positions by row group."""
        rows = sum(map(len, missing.values()))
        progress, shard = Progress(self.events, rows, "pairs"), NewShard(self.cache)
        for batch, tokens in encode_batches(self.encoder, self._batches(missing), rows):
            for at in np.flatnonzero(tokens.column("reason").is_valid().to_numpy(zero_copy_only=False)):
                check(batch[at], tokens.column("reason")[at].as_py(), tokens.column("detail")[at].as_py())
            shard.add(keys_of([row["identity"] for row in batch]), tokens)
            self.tokenized += len(batch)
            progress.advance(len(batch))
        shard.commit()

    def _batches(self, missing: Mapping[int, NDArray[np.int64]]) -> Iterator[Rows]:
        for group, positions in missing.items():
            if len(positions):
                table = self.source.read_row_group(group).take(pa.array(positions))
                for begin in range(0, len(table), _BATCH_ROWS):
                    yield table.slice(begin, _BATCH_ROWS).to_pylist()


def _keys_of(group: pa.Table) -> Keys:
    return keys_of(group.column("identity").to_pylist())
