"""Check the fields that a row needs to become a pair.

A row that fails is neither repaired nor dropped. It goes to quarantine with a counted `QuarantineReason` and a detail.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]

# Of one text: about a million tokens. A tokenizer needs 190 bytes for each character while it works, so a whole log file that
# slipped into a row by mistake would exhaust the memory.
_MOST_CHARACTERS = 1 << 22


class QuarantineReason(StrEnum):
    BAD_JSON = "bad JSON"
    BAD_UNICODE = "invalid unicode"
    NUL = "NUL character"
    DUPLICATE_KEY = "duplicate key"
    NOT_AN_OBJECT = "not an object"
    MISSING_FIELD = "missing field"
    WRONG_TYPE = "wrong type"
    UNSUPPORTED_FIELD = "unsupported field"
    UNKNOWN_ROLE = "unknown role"
    EMPTY_PROMPT = "empty prompt"
    EMPTY_RESPONSE = "empty response"
    IDENTICAL = "chosen equals rejected"
    PROMPTS_DIFFER = "prompts differ"
    RESPONSE_ROLE = "response not from the assistant"
    PROMPT_ROLE = "prompt does not end with the user"
    ENORMOUS = "enormous text"
    BAD_TRANSCRIPT = "not a transcript"
    TIE = "tie"
    UNKNOWN_LABEL = "unknown label"


class Quarantined(Exception):
    """This row cannot become a pair: `reason` is counted, `detail` says what is wrong in it."""

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def field_of(row: Row, name: str, place: str = "") -> Any:
    """The field `name` of a row, or of the part of one at `place`."""
    if (found := row.get(name)) is None:
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"`{place}{name}` is missing")
    return found


def text_of(row: Row, name: str, place: str = "") -> str:
    return clean_text(field_of(row, name, place), f"{place}{name}")


def optional_text(row: Row, name: str) -> str:
    """The text of a field that may be absent or null: then the empty string."""
    return text_of(row, name) if row.get(name) is not None else ""


def clean_text(value: Any, place: str) -> str:
    """`value` if it is text that every tokenizer and file format here can hold."""
    if not isinstance(value, str):
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{place}` is {type(value).__name__}, expected text")
    if len(value) > _MOST_CHARACTERS:
        raise Quarantined(
            QuarantineReason.ENORMOUS,
            f"`{place}` has {len(value):,} characters, at most {_MOST_CHARACTERS:,} are accepted",
        )
    if "\0" in value:
        raise Quarantined(
            QuarantineReason.NUL,
            f"`{place}` has a NUL character at position {value.index(chr(0))}; take it out of the text",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Quarantined(QuarantineReason.BAD_UNICODE, f"`{place}` has a lone surrogate at {error.start}") from None
    return value


def check_supported(row: Row, names: Sequence[str], place: str) -> None:
    """Raises Quarantined for a field that is not empty; some files write an empty list as text."""
    for name in names:
        if row.get(name) and row[name] != "[]":
            raise Quarantined(QuarantineReason.UNSUPPORTED_FIELD, f"`{place}` has `{name}`, which is not supported")


def strict_json(text: str) -> Any:
    """What `text` says as JSON; NaN is none. Raises Quarantined for a key that appears twice, ValueError, RecursionError."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(items)
    if len(unique) < len(items):
        [(twice, _)] = Counter(key for key, _ in items).most_common(1)
        raise Quarantined(QuarantineReason.DUPLICATE_KEY, f"the key {twice!r} appears twice")
    return unique


def _reject_constant(name: str) -> float:
    raise Quarantined(QuarantineReason.BAD_JSON, f"{name} is not JSON")
