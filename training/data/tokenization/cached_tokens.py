"""The tokens of all rows of `raw_preferences`, through the token cache."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
        missing = self._count_missing()
        self.cached = len(self) - missing
        self.events.note(f"{len(self):,} rows: {self.cached:,} in the token cache, {missing:,} to tokenize")
        if missing:
            self._encode(range(self.source.num_row_groups), missing, check)

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
            self._encode([group], len(keys), lambda *_: None)
        raise TrainingError(
            f"the token cache in {self.cache.store.root} lost rows {_TRIES} times while they were read; check its disk and run "
            "again",
            "cache-shards-lost",
        )

    def _count_missing(self) -> int:
        groups = (self.source.read_row_group(n, columns=["identity"]) for n in range(self.source.num_row_groups))
        return sum(int((~self.cache.lookup(_keys_of(group))).sum()) for group in groups)

    def _encode(self, groups: Iterable[int], rows: int, check: Callable[[Mapping[str, Any], str, str], None]) -> None:
        progress, shard = Progress(self.events, rows, "pairs"), NewShard(self.cache)
        for batch, tokens in encode_batches(self.encoder, self._missing_batches(groups), rows):
            for at in np.flatnonzero(tokens.column("reason").is_valid().to_numpy(zero_copy_only=False)):
                check(batch[at], tokens.column("reason")[at].as_py(), tokens.column("detail")[at].as_py())
            shard.add(keys_of([row["identity"] for row in batch]), tokens)
            self.tokenized += len(batch)
            progress.advance(len(batch))
        shard.commit()

    def _missing_batches(self, groups: Iterable[int]) -> Iterator[Rows]:
        for number in groups:
            keys = _keys_of(self.source.read_row_group(number, columns=["identity"]))
            missing = np.flatnonzero(~self.cache.lookup(keys))
            if not len(missing):
                continue
            table = self.source.read_row_group(number).take(pa.array(missing))
            for begin in range(0, len(table), _BATCH_ROWS):
                yield table.slice(begin, _BATCH_ROWS).to_pylist()


def _keys_of(group: pa.Table) -> Keys:
    return keys_of(group.column("identity").to_pylist())
