"""Which pairs are in one `raw_preferences` and not in another: what a new version of the data brought, and what it took.

A pair is known by all that it says. So one that was edited is a pair removed and a pair added, wherever it is in the files
now, and another split, or another order, is no change here.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import StoreError, UnreadableArtifact
from training.contract.identity.hash_cache import HashCache
from training.contract.store.store import Artifact, Store

_COLUMNS = ["identity", "source", "line"]


@dataclass(frozen=True)
class PairChanges:
    """How many pairs were added and removed; the first of each as `file, line n`, of those removed as it was before."""

    added: int
    removed: int
    first_added: str | None
    first_removed: str | None

    def words(self) -> Iterator[str]:
        for count, what, first in (
            (self.added, "added", f"in {self.first_added}"),
            (self.removed, "removed", f"was in {self.first_removed}"),
        ):
            if count:
                yield f"{count:,} {'pair' if count == 1 else 'pairs'} {what}, the first {first}"


def pair_changes(store: Store, before: str | None, now: Artifact, cache: HashCache) -> PairChanges | None:
    """From the `raw_preferences` of the fingerprint `before` to `now`.

    None if there was none, if they are the same, or if they cannot be compared.
    """
    if before is None or before == now.fingerprint:
        return None
    try:
        old = _pairs(store.open("raw_preferences", before, cache=cache))
        new = _pairs(now)
    except (StoreError, UnreadableArtifact):
        return None
    if old is None or new is None:
        return None
    of_old, of_new = old["identity"].to_pylist(), new["identity"].to_pylist()
    added, removed = _beyond(of_new, of_old), _beyond(of_old, of_new)
    return PairChanges(len(added), len(removed), _place(new, added), _place(old, removed))


def _pairs(rows: Artifact) -> pa.Table | None:
    """None where the rows were read by an earlier version, which did not write down the pairs' identities."""
    with pq.ParquetFile(rows.file("preferences.parquet")) as file:
        return file.read(columns=_COLUMNS) if "identity" in file.schema_arrow.names else None


def _beyond(pairs: Sequence[str], others: Sequence[str]) -> list[int]:
    """The rows of `pairs` that `others` does not have; of a pair that occurs more often, those that come last."""
    left = Counter(others)
    found = []
    for row, identity in enumerate(pairs):
        if left[identity]:
            left[identity] -= 1
        else:
            found.append(row)
    return found


def _place(pairs: pa.Table, rows: list[int]) -> str | None:
    if not rows:
        return None
    return f"{pairs['source'][rows[0]].as_py()}, line {pairs['line'][rows[0]].as_py()}"
