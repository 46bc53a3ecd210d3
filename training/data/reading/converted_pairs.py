"""Pairs as rows of the pair cache: a row of a data file is parsed and converted once.

    prompt, chosen, rejected, tools, chat_template_kwargs   binary      canonical JSON; null if a row has none
    prompt_digest                                           binary[32]  digest of the prompt's roles and contents
    identity, opposite                                      string, binary[16]   PairIdentity

Rows in quarantine are not cached: they are few, and their reasons may improve.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from training.contract.config.json_object import JsonObject
from training.contract.identity.fingerprint import canonical_json, canonical_object, fingerprint, value_digest
from training.contract.store.row_cache import KEY_BYTES, NewShard, PairCache
from training.contract.store.shard_cache import Keys
from training.data.formats.columns import ColumnMapping
from training.data.formats.messages import Message, Pair, message
from training.data.reading.duplicates import PairIdentity

_PARTS = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
_PLAIN_FIELDS = ("role", "content")


@dataclass(frozen=True)
class ConvertedPair:
    """A pair with its digests. `parts` is the canonical JSON of the parts that it has."""

    parts: dict[str, bytes]
    prompt_digest: bytes
    identity: PairIdentity
    _turns: JsonObject | None = None

    @classmethod
    def of(cls, pair: Pair) -> "ConvertedPair":
        turns: JsonObject = {part: list(getattr(pair, part)) for part in ("prompt", "chosen", "rejected")}
        turns |= {part: text for part in ("tools", "chat_template_kwargs") if (text := getattr(pair, part))}
        parts = {name: canonical_json(part) for name, part in turns.items()}
        return cls(parts, _prompt_digest(pair.prompt, parts["prompt"]), PairIdentity.of(parts), turns)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "ConvertedPair":
        parts = {part: row[part] for part in _PARTS if row[part] is not None}
        return cls(parts, row["prompt_digest"], PairIdentity(bytes.fromhex(row["identity"]), row["opposite"]))

    @property
    def turns(self) -> JsonObject:
        """The parts as messages and texts."""
        return self._turns or {name: json.loads(part) for name, part in self.parts.items()}

    def row(self) -> JsonObject:
        """Return the row of the cache."""
        identity = {"identity": self.identity.identity.hex(), "opposite": self.identity.opposite}
        return {**self.parts, "prompt_digest": self.prompt_digest, **identity}

    def digest(self, origin: Mapping[str, Any]) -> bytes:
        """Return the digest of the pair and its origin: split, line and name of the source."""
        content = self.parts | {name: canonical_json(value) for name, value in origin.items()}
        return hashlib.sha256(canonical_object(content)).digest()


def pair_rule(format: str, columns: ColumnMapping, code_version: str) -> str:
    """Return the fingerprint of all that the conversion of a row depends on, except its content."""
    mapping = {"columns": columns.names, "roles": dict(columns.roles)}
    return fingerprint("pair_rule", {"format": format, **mapping, "code_version": code_version})


@dataclass
class CachedPairs:
    """The pair cache of one rule during a pass."""

    cache: PairCache
    known: int = 0
    _new: list[tuple[bytes, ConvertedPair]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shard = NewShard(self.cache)

    def find(self, keys: Sequence[bytes | None]) -> Iterator[ConvertedPair | None]:
        """Yield the cached pair of each key, or None."""
        keys_QK = _as_keys([key or bytes(KEY_BYTES) for key in keys])
        is_known = self.cache.lookup(keys_QK) & np.array([key is not None for key in keys], np.bool_)
        table = self.cache.rows(keys_QK[is_known])
        if table is None:  # a corrupt shard was set aside
            is_known[:] = False
        rows = iter(() if table is None else table.to_pylist())
        self.known += int(is_known.sum())
        yield from (ConvertedPair.of_row(next(rows)) if known else None for known in is_known)

    def add(self, key: bytes | None, pair: ConvertedPair) -> None:
        if key is not None:
            self._new.append((key, pair))

    def end_block(self) -> None:
        """Pass on the rows added since the last call."""
        if self._new:
            rows = [pair.row() for _, pair in self._new]
            self._shard.add(
                _as_keys([key for key, _ in self._new]), pa.RecordBatch.from_pylist(rows, self.cache.schema)
            )
            self._new = []

    def commit(self) -> None:
        self._shard.commit()


def _as_keys(keys: Sequence[bytes]) -> Keys:
    return np.frombuffer(b"".join(key[:KEY_BYTES] for key in keys), np.uint8).reshape(-1, KEY_BYTES)


def _prompt_digest(prompt: Sequence[Message], content: bytes) -> bytes:
    """Return the digest of roles and contents. Ids of calls and reasoning are left out, as templates may not write them.

    `content` is the canonical JSON of the prompt.
    """
    if all(len(turn) == len(_PLAIN_FIELDS) for turn in prompt):
        return hashlib.sha256(content).digest()
    return value_digest([message(turn["role"], turn["content"]) for turn in prompt])
