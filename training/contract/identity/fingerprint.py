"""Fingerprints: sha256 over canonical JSON. (Of the bytes of files: training.contract.identity.file_hashing.)

An identity is always `fingerprint(kind, content)`: the kind and the schema version are part of what is hashed, so two
artifacts of different kinds never share one, and a change of format starts a new family. People see 12 digits, files
hold all 64.
"""

import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from training.contract.errors import UsageError

SCHEMA_VERSION = 1
KEY_BYTES = 32  # of the identity of a sequence
_FINGERPRINT = re.compile("[0-9a-f]{64}")
# Made once: each pair is written so nine times, and `json.dumps` makes one each time.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """`value` as sorted, compact UTF-8 JSON. Floats are written by `repr`, which is exact; NaN and infinity are refused.

    Raises ValueError for a non-finite number and TypeError for what JSON cannot hold.
    """
    return _CANONICAL.encode(value).encode()


def check_text(path: Path, kind: type[UsageError] = UsageError) -> None:
    """Raises an error of this `kind` where a path is not text, and so can be in no JSON."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        legible = os.fsencode(path).decode(errors="backslashreplace")
        raise kind(
            f"{legible} has bytes that are not {sys.getfilesystemencoding()}; rename it, or, where it is UTF-8, set a locale "
            "such as LC_ALL=C.UTF-8"
        ) from None


def value_digest(value: Any) -> bytes:
    """sha256 of `value` as canonical JSON."""
    return hashlib.sha256(canonical_json(value)).digest()


def fingerprint(kind: str, content: Any) -> str:
    """The identity of `content` as an artifact of `kind`: 64 hexadecimal digits."""
    return value_digest([SCHEMA_VERSION, kind, content]).hex()


def fingerprint_of_stream(kind: str, items: Iterable[bytes]) -> str:
    """The identity of a sequence of byte strings, in order, without holding them all; each is length-prefixed."""
    digest = hashlib.sha256(canonical_json([SCHEMA_VERSION, kind]))
    for item in items:
        digest.update(len(item).to_bytes(8, "big"))
        digest.update(item)
    return digest.hexdigest()


def sequence_key(ids: Sequence[int], mask: Sequence[bool]) -> bytes:
    """The identity of a token sequence, `KEY_BYTES` of them: its token ids and which of them are trained."""
    assert len(ids) == len(mask), f"{len(ids)} ids and {len(mask)} mask entries"
    digest = hashlib.sha256(canonical_json([SCHEMA_VERSION, "sequence", len(ids)]))
    digest.update(struct.pack(f"<{len(ids)}i", *ids))
    digest.update(bytes(mask))
    return digest.digest()


def short(full: str | None) -> str:
    """The first 12 digits: what people see."""
    return full[:12] if full else "-"


def shortened(text: str) -> str:
    """`text` as people see it: short if it is a fingerprint."""
    return short(text) if _FINGERPRINT.fullmatch(text) else text
