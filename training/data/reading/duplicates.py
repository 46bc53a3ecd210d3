"""Find pairs that repeat an earlier pair, as in overlapping exports, or that contradict one."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from training.contract.identity.fingerprint import canonical_object

_SIDES = ("chosen", "rejected")
_IDENTITY_BYTES = 16


@dataclass(frozen=True)
class PairIdentity:
    """The identity of a pair, from prompt, chosen, rejected, tools and template arguments.

    `opposite` is the identity of the pair with chosen and rejected exchanged.
    """

    identity: bytes
    opposite: bytes

    @classmethod
    def of(cls, parts: Mapping[str, bytes]) -> "PairIdentity":
        """Return the identity of a pair from the canonical JSON of its parts."""
        rest = canonical_object({part: value for part, value in parts.items() if part not in _SIDES})
        shared, chosen, rejected = (hashlib.sha256(text).digest() for text in (rest, *(parts[side] for side in _SIDES)))
        return cls(_identity(shared, chosen, rejected), _identity(shared, rejected, chosen))


@dataclass
class Duplicates:
    """Counts repeated and contradicting pairs. It holds `_IDENTITY_BYTES` for each distinct pair."""

    are_dropped: bool
    count: int = 0
    conflicting: int = 0
    first: str = ""
    first_conflicting: str = ""
    _identities: set[bytes] = field(default_factory=set)

    @property
    def dropped(self) -> int:
        return self.count if self.are_dropped else 0

    def drops(self, pair: PairIdentity, line: str) -> bool:
        """Count a pair. Return whether to drop it, as a duplicate."""
        if pair.identity in self._identities:
            self.count += 1
            self.first = self.first or line
            return self.are_dropped
        self._identities.add(pair.identity)
        if pair.opposite in self._identities:
            self.conflicting += 1
            self.first_conflicting = self.first_conflicting or line
        return False

    def notes(self) -> Iterator[str]:
        """Yield notes for the log."""
        if self.count:
            fate = "dropped" if self.are_dropped else "kept, `data.duplicates: drop` would drop them"
            yield f"pairs that repeat an earlier one: {self.count}, the first: {self.first}; they were {fate}"
        if self.conflicting:
            yield f"pairs that contradict an earlier one: {self.conflicting}, the first: {self.first_conflicting}"


def _identity(*digests: bytes) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()[:_IDENTITY_BYTES]
