"""Pairs added and removed between two `raw_preferences`.

A pair is identified by its full content. So an edited pair counts as one removed and one added. A change of split or order
does not count.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import StoreError, UnreadableArtifact
from training.contract.identity.hash_cache import HashCache
from training.contract.protocol.artifacts import RAW_PREFERENCES
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store

_COLUMNS = ["identity", "source", "line"]


@dataclass(frozen=True)
class PairChanges:
    """Counts of added and removed pairs, and the place of each first one as `file, line n`, in the files at that time."""

    added: int
    removed: int
    first_added: str | None
    first_removed: str | None

    def words(self) -> Iterator[str]:
        for count, change, first in (
            (self.added, "added", f"in {self.first_added}"),
            (self.removed, "removed", f"was in {self.first_removed}"),
        ):
            if count:
                yield f"{count:,} {'pair' if count == 1 else 'pairs'} {change}, the first {first}"


def pair_changes(store: Store, before: str | None, now: Artifact, cache: HashCache) -> PairChanges | None:
    """Return the changes from the `raw_preferences` with the fingerprint `before` to `now`.

    Return None if `before` is None, if both are the same, or if they cannot be compared.
    """
    if before is None or before == now.fingerprint:
        return None
    try:
        old = _read_pairs(store.open(RAW_PREFERENCES, before, cache=cache))
        new = _read_pairs(now)
    except (StoreError, UnreadableArtifact):
        return None
    if old is None or new is None:
        return None
    old_pairs, new_pairs = old["identity"].to_pylist(), new["identity"].to_pylist()
    added, removed = _find_extra_rows(new_pairs, old_pairs), _find_extra_rows(old_pairs, new_pairs)
    return PairChanges(len(added), len(removed), _first_place(new, added), _first_place(old, removed))


def _read_pairs(rows: Artifact) -> pa.Table | None:
    """Return the pairs' identities and places; None if an earlier version read the rows, without identities."""
    with pq.ParquetFile(rows.file("preferences.parquet")) as file:
        return file.read(columns=_COLUMNS) if "identity" in file.schema_arrow.names else None


def _find_extra_rows(pairs: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return the rows of `pairs` missing from `others`. If a pair occurs more often, return its last occurrences."""
    left = Counter(others)
    extra = []
    for row, identity in enumerate(pairs):
        if left[identity]:
            left[identity] -= 1
        else:
            extra.append(row)
    return extra


def _first_place(pairs: pa.Table, rows: list[int]) -> str | None:
    if not rows:
        return None
    return f"{pairs['source'][rows[0]].as_py()}, line {pairs['line'][rows[0]].as_py()}"
