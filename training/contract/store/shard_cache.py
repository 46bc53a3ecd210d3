"""Caches of values by key, in immutable shards: the index and the handling of shards that all caches share.

A cache is the set of artifacts of one kind, `<name>/<rule>`. The *rule* is the fingerprint of all that the values depend on,
except their keys. Any number of processes may add shards at once. If several shards hold a key, the oldest wins, so a
recomputed artifact has the same bits. A corrupt shard is set aside with a note, and its keys count as missing: a lost cache
costs time, a wrong one would cost a model.

A process hashes each shard's index once; later lookups open new shards only. Memory use is 16 bytes per key: its first 8 bytes,
sorted, and its row. Keys stay memory-mapped. Shards are never merged: the only cost of a small shard is opening it once.

Legend: S keys of a shard, Q requested keys, R requested keys without an answer yet, K bytes of a key.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from training.contract.errors import CorruptArtifact, StoreError
from training.contract.identity.fingerprint import short
from training.contract.identity.safetensors_file import map_tensors
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import ArtifactKind, Details
from training.contract.store.manifest import read_error
from training.contract.store.store import Store


class ShardDetails(Details):
    """Counts of a shard of log-probs (`sequences`, `tokens`) or of rows, and the `software` that computed it."""

    sequences: int = 0
    tokens: int = 0
    rows: int = 0
    software: dict[str, str] | None = None


Keys = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]

_BLOCK_KEYS = 1 << 20  # keys looked up at a time, to bound memory
_LOG = logging.getLogger(__name__)


class Shard(Protocol):
    """An open shard: a row for each key."""

    @property
    def artifact(self) -> Artifact[ShardDetails]: ...
    @property
    def keys_SK(self) -> Keys: ...
    def __len__(self) -> int: ...


AnyShard = TypeVar("AnyShard", bound=Shard)


class ShardIndex(Generic[AnyShard]):
    """All rows of `shards`, sorted by key prefix, then by the order of the shards."""

    def __init__(self, shards: list[AnyShard]) -> None:
        self.shards = shards
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])
        prefixes_S = np.empty(self._starts[-1], np.uint64)
        for shard, start in zip(shards, self._starts, strict=False):
            prefixes_S[start : start + len(shard)] = key_prefixes(shard.keys_SK)
        self._rows_S: Rows = np.argsort(prefixes_S, kind="stable")
        self._prefixes_S = prefixes_S[self._rows_S]

    def find(self, keys_QK: Keys) -> Iterator[tuple[AnyShard, Rows, Rows]]:
        """Yield, shard by shard, the rows with some of the keys, and the positions of these keys in `keys_QK`.

        Binary search on the prefix, then compare all 32 bytes. Rows with the same prefix are neighbours. So all unanswered
        keys advance by one row at a time, until they match or leave their prefix.
        """
        prefixes_Q = key_prefixes(keys_QK)
        open_R = np.argsort(prefixes_Q)  # sorted keys read the index in the order of memory
        at_R = np.searchsorted(self._prefixes_S, prefixes_Q[open_R])
        while True:
            inside_R = at_R < len(self._prefixes_S)
            open_R, at_R = open_R[inside_R], at_R[inside_R]
            same_R = self._prefixes_S[at_R] == prefixes_Q[open_R]
            open_R, at_R = open_R[same_R], at_R[same_R]
            if not len(open_R):
                return
            answered_R = np.zeros(len(open_R), np.bool_)
            for shard, rows, positions in self._group_by_shard(self._rows_S[at_R]):
                equal = (_as_uint64(shard.keys_SK[rows]) == _as_uint64(keys_QK[open_R[positions]])).all(axis=1)
                answered_R[positions] = equal
                yield shard, rows[equal], open_R[positions[equal]]
            open_R, at_R = open_R[~answered_R], at_R[~answered_R] + 1

    def _group_by_shard(self, rows_R: Rows) -> Iterator[tuple[AnyShard, Rows, Rows]]:
        """Group rows of this index by shard: yield the shard, the rows in it, and their positions in `rows_R`."""
        shard_R = np.searchsorted(self._starts, rows_R, side="right") - 1
        narrowest = np.uint16 if len(self.shards) < 1 << 16 else np.uint32  # numpy's radix sort is for 16 bits
        order_R = np.argsort(shard_R.astype(narrowest), kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(shard_R, minlength=len(self.shards)))])
        for number in np.flatnonzero(np.diff(bounds)):
            positions = order_R[bounds[number] : bounds[number + 1]]
            yield self.shards[number], rows_R[positions] - self._starts[number], positions


@dataclass
class ShardCache(ABC, Generic[AnyShard]):
    """All shards of `rule`. `note` is called with a message for every shard set aside.

    `software`: the library versions and the device of this process, written beside the shards it adds.
    """

    store: Store
    rule: str
    note: Callable[[str], None] = _LOG.warning
    software: Mapping[str, str] = field(default_factory=dict)
    _shards: dict[str, AnyShard] = field(default_factory=dict, init=False, repr=False)
    _index: ShardIndex[AnyShard] = field(default_factory=lambda: ShardIndex([]), init=False, repr=False)
    name: ClassVar[str]  # the first part of the kind of its shards
    title: ClassVar[str]  # in notes: the cache, and what is done again
    again: ClassVar[str]

    @property
    def kind(self) -> str:
        return f"{self.name}/{self.rule}"

    @property
    def artifact_kind(self) -> ArtifactKind[ShardDetails]:
        return ArtifactKind(self.kind, ShardDetails)

    @abstractmethod
    def open_shard(self, artifact: Artifact[ShardDetails]) -> AnyShard:
        """Open the shard in `artifact` and verify its index. Raises CorruptArtifact."""

    def bytes(self) -> int:
        """Return the size of all shards."""
        self._refresh()
        return sum(entry.bytes for shard in self._shards.values() for entry in shard.artifact.manifest.files.values())

    def computed_by_other_software(self, keys_QK: Keys) -> npt.NDArray[np.bool_]:
        """Return bool[Q]: whether other software, or another device, computed the value of each key."""
        self._refresh()
        is_other_Q = np.zeros(len(keys_QK), np.bool_)
        for shard, _, positions in self._find(keys_QK):
            is_other_Q[positions] = self._is_by_other_software(shard)
        return is_other_Q

    def set_aside_computed_by_other_software(self, why: str) -> None:
        """Set aside every shard of other software, or of another device. The note ends with `why`."""
        self._refresh()
        for shard in [shard for shard in self._shards.values() if self._is_by_other_software(shard)]:
            self._drop(shard, StoreError(why, "other-software"))

    def _is_by_other_software(self, shard: AnyShard) -> bool:
        """Return whether other software made the shard. Shards of older versions name no device, so they count as other."""
        return shard.artifact.details.software != self.software

    def _find(self, keys_QK: Keys) -> Iterator[tuple[AnyShard, Rows, Rows]]:
        """Run `ShardIndex.find` on one block of keys at a time."""
        for begin in range(0, len(keys_QK), _BLOCK_KEYS):
            for shard, rows, positions in self._index.find(keys_QK[begin : begin + _BLOCK_KEYS]):
                yield shard, rows, begin + positions

    def _refresh(self) -> None:
        """Open new shards. Opened shards are immutable and stay."""
        new = [name for name in self.store.fingerprints(self.kind) if name not in self._shards]
        opened = {name: shard for name in new if (shard := self._open(name)) is not None}
        if opened:
            self._shards |= opened
            self._build_index()

    def _build_index(self) -> None:
        self._index = ShardIndex(sorted(self._shards.values(), key=_age))

    def _open(self, name: str) -> AnyShard | None:
        """Open and verify a shard; set it aside and return None if it is corrupt."""
        try:
            return self.open_shard(self.store.open(self.artifact_kind, name, hashes=False))
        except StoreError as error:
            self._set_aside(name, error)
            return None

    def _drop(self, shard: AnyShard, error: StoreError) -> None:
        """Set an open shard aside and remove it from the index."""
        self._set_aside(shard.artifact.fingerprint, error)
        del self._shards[shard.artifact.fingerprint]
        self._build_index()

    def _set_aside(self, name: str, error: StoreError) -> None:
        try:
            path = self.store.set_aside(self.kind, name)
        except FileNotFoundError:  # another process has set it aside
            return
        self.note(f"set aside shard {short(name)} of the {self.title} in {path}, to {self.again}: {error}")


def _age(shard: Shard) -> tuple[str, str]:
    """Return the sort key of shards: the second of creation, then the fingerprint."""
    return shard.artifact.manifest.created, shard.artifact.fingerprint


def read_arrays(path: Path, dtypes: Mapping[str, type[np.generic]]) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of a shard's file. Raises CorruptArtifact if it has others, UnreadableArtifact."""
    try:
        arrays = map_tensors(path)
    except OSError as error:
        raise read_error(path, error) from error
    except ValueError as error:
        raise CorruptArtifact(f"{path} is not part of a shard: {error}", "corrupt-shard") from error
    actual = {name: array.dtype for name, array in arrays.items()}
    if actual != {name: np.dtype(dtype) for name, dtype in dtypes.items()}:
        raise CorruptArtifact(f"{path} holds {actual}, expected {dtypes}", "corrupt-shard")
    return arrays


def key_prefixes(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return the first 8 bytes of each key as a big-endian number: sorting by it sorts the keys, almost always uniquely."""
    return np.ascontiguousarray(keys[:, :8]).view(">u8")[:, 0].astype(np.uint64)


def _as_uint64(keys: Keys) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)
