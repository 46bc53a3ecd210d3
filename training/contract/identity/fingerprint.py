"""Fingerprints: sha256 over canonical JSON. (For files, see training.contract.identity.file_hashing.)

`fingerprint(kind, content)` also hashes the kind and the schema version. So artifacts of different kinds never share a
fingerprint, and a new format gives new fingerprints. Displays show 12 digits, files hold all 64.
"""

import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.contract.errors import UsageError

SCHEMA_VERSION = 1
KEY_BYTES = 32  # the length of a sequence's key
_FINGERPRINT = re.compile("[0-9a-f]{64}")
# One encoder for all calls: `json.dumps` would create one per call, nine per pair.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Return `value` as sorted, compact UTF-8 JSON. Floats are written exactly, by `repr`.

    Raises ValueError for NaN and infinity, TypeError for types unknown to JSON.
    """
    return _CANONICAL.encode(value).encode()


def canonical_object(fields: Mapping[str, bytes]) -> bytes:
    """Return the canonical JSON of an object from that of its values. The names need no escapes."""
    return b"{%s}" % b",".join(b'"%s":%s' % (name.encode(), fields[name]) for name in sorted(fields))


def check_text(path: Path, kind: type[UsageError] = UsageError) -> None:
    """Raise an error of this `kind` if a path has undecodable bytes: JSON could not hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        legible = os.fsencode(path).decode(errors="backslashreplace")
        raise kind(
            f"{legible} has bytes that are not {sys.getfilesystemencoding()}; rename it, or, if it is UTF-8, set a locale "
            "such as LC_ALL=C.UTF-8",
            "undecodable-path",
        ) from None


def value_digest(value: Any) -> bytes:
    """Return the sha256 of `value` as canonical JSON."""
    return hashlib.sha256(canonical_json(value)).digest()


def fingerprint(kind: str, content: Any) -> str:
    """Return the fingerprint of `content` as an artifact of `kind`: 64 hexadecimal digits."""
    return value_digest([SCHEMA_VERSION, kind, content]).hex()


class StreamFingerprint:
    """The fingerprint of an ordered stream of byte strings, each hashed with its length."""

    def __init__(self, kind: str) -> None:
        self._digest, self.count = hashlib.sha256(canonical_json([SCHEMA_VERSION, kind])), 0

    def add(self, item: bytes) -> None:
        self._digest.update(len(item).to_bytes(8, "big"))
        self._digest.update(item)
        self.count += 1

    def fingerprint(self) -> str:
        """Return the fingerprint of the items so far."""
        return self._digest.hexdigest()


def fingerprint_of_stream(kind: str, items: Iterable[bytes]) -> str:
    """Return the fingerprint of an ordered stream of byte strings."""
    stream = StreamFingerprint(kind)
    for item in items:
        stream.add(item)
    return stream.fingerprint()


def sequence_key(ids: Sequence[int], mask: Sequence[bool]) -> bytes:
    """Return the key of a sequence, `KEY_BYTES` long: the digest of its token ids and mask."""
    assert len(ids) == len(mask), f"{len(ids)} ids and {len(mask)} mask entries"
    return sequence_key_of_parts(len(ids), struct.pack(f"<{len(ids)}i", *ids), bytes(mask))


def sequence_key_of_parts(length: int, *parts: bytes | memoryview) -> bytes:
    """Return the key of a sequence of `length` tokens. Parts hold ids (little-endian int32), then mask (bytes)."""
    digest = hashlib.sha256(b'[%d,"sequence",%d]' % (SCHEMA_VERSION, length))
    for part in parts:
        digest.update(part)
    return digest.digest()


def short(full: str | None) -> str:
    """Return the first 12 digits, for display."""
    return full[:12] if full else "-"


def shortened(text: str) -> str:
    """Return the text for display: short if it is a fingerprint."""
    return short(text) if _FINGERPRINT.fullmatch(text) else text
