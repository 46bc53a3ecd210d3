"""Check the fields of a row. A row that fails goes to quarantine, with a `QuarantineReason` and a detail."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]

# About a million tokens. A tokenizer needs 190 bytes a character, so a log file in a field would exhaust the memory.
_MOST_CHARACTERS = 1 << 22


# The text of a row, with escapes and columns that are not used. A larger one would need several times its size of memory.
LONGEST_ROW = 1 << 26


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
    """A row cannot become a pair. The reason is counted; the detail describes this row."""

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def enormous_row(count: int, unit: str) -> Quarantined:
    return Quarantined(
        QuarantineReason.ENORMOUS, f"the row has {count:,} {unit}, expected at most {LONGEST_ROW:,}: split or remove it"
    )


def field_of(row: Row, name: str, path: str = "") -> Any:
    """Return the field `name` of `row`, which is the part of a row at `path`. Raise Quarantined if it is missing."""
    if (value := row.get(name)) is None:
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"`{path}{name}` is missing")
    return value


def text_of(row: Row, name: str, path: str = "") -> str:
    return clean_text(field_of(row, name, path), f"{path}{name}")


def optional_text(row: Row, name: str) -> str:
    """Return the text of a field; an empty text if the field is missing or null."""
    return text_of(row, name) if row.get(name) is not None else ""


def clean_text(value: Any, path: str) -> str:
    """Return `value`. Raise Quarantined unless it is text that every tokenizer and file format here can hold."""
    if not isinstance(value, str):
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{path}` is {type(value).__name__}, expected text")
    if len(value) > _MOST_CHARACTERS:
        raise Quarantined(
            QuarantineReason.ENORMOUS,
            f"`{path}` has {len(value):,} characters, expected at most {_MOST_CHARACTERS:,}",
        )
    if "\0" in value:
        raise Quarantined(
            QuarantineReason.NUL,
            f"`{path}` has a NUL character at position {value.index(chr(0))}; remove it from the text",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Quarantined(QuarantineReason.BAD_UNICODE, f"`{path}` has a lone surrogate at {error.start}") from None
    return value


def check_supported(row: Row, names: Sequence[str], path: str) -> None:
    """Raise Quarantined if one of the fields `names` is not empty. Some files write an empty list as text."""
    for name in names:
        if row.get(name) and row[name] != "[]":
            raise Quarantined(QuarantineReason.UNSUPPORTED_FIELD, f"`{path}` has `{name}`, which is not supported")


def strict_json(text: str) -> Any:
    """Parse JSON. Raise Quarantined for NaN, infinity or a repeated key, else ValueError or RecursionError."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(items)
    if len(unique) < len(items):
        [(repeated, _)] = Counter(key for key, _ in items).most_common(1)
        raise Quarantined(QuarantineReason.DUPLICATE_KEY, f"the key {repeated!r} appears twice")
    return unique


def _reject_constant(name: str) -> float:
    raise Quarantined(QuarantineReason.BAD_JSON, f"{name} is not JSON")
