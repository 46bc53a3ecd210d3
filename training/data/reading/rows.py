"""Rows of files: parsed, or lines of JSON still to be parsed. A row that cannot be parsed has a problem instead of a value."""

import hashlib
import json
from dataclasses import dataclass

from training.contract.identity.fingerprint import canonical_json
from training.data.formats.quarantine import (
    LONGEST_ROW,
    Quarantined,
    QuarantineReason,
    Row,
    enormous_row,
    strict_json,
)
from training.data.reading.file_errors import invalid_byte, undecoded_byte

SHOWN_CHARACTERS = 1000  # of a row that is too long to keep


@dataclass(frozen=True)
class ParsedRow:
    """One row. `line` counts from 1. In files without lines it is the row's number.

    `raw` is the text; None for binary files and CSV. With a `problem`, `value` is empty.
    """

    line: int
    value: Row
    raw: str | None = None
    problem: Quarantined | None = None

    def parsed(self) -> "ParsedRow":
        return self

    @property
    def key(self) -> bytes | None:
        """The digest of the row's content; None if it has a problem, or values unknown to JSON."""
        if self.problem is not None:
            return None
        if self.raw is not None:
            return _text_key(self.raw.encode("utf-8", "surrogatepass"))
        try:
            return hashlib.sha256(b"table:" + canonical_json(self.value)).digest()
        except (TypeError, ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        """The row as text that any file can hold, for users to read."""
        text = json.dumps(self.value, default=str, ensure_ascii=False) if self.raw is None else self.raw
        return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")

    @property
    def undecoded(self) -> str:
        """A description of the first byte that is not UTF-8; an empty text without one."""
        return undecoded_byte(self.value, self.raw)


@dataclass(frozen=True)
class UnparsedRow:
    """A line of JSON, still to be parsed."""

    line: int
    content: bytes

    def parsed(self) -> ParsedRow:
        """Parse the line strictly."""
        try:
            return parse_row(self.line, self.content.decode())
        except UnicodeDecodeError:
            problem = Quarantined(QuarantineReason.BAD_UNICODE, invalid_byte(self.content, "the line"))
            return ParsedRow(self.line, {}, self.content.decode(errors="backslashreplace"), problem)

    @property
    def key(self) -> bytes:
        """The digest of the line."""
        return _text_key(self.content)


def parse_row(line: int, text: str) -> ParsedRow:
    """Parse one JSON object strictly: without duplicate keys, NaN, or nesting beyond the parser's limit."""
    if len(text) > LONGEST_ROW:
        return ParsedRow(line, {}, text[:SHOWN_CHARACTERS], enormous_row(len(text), "characters"))
    try:
        value = strict_json(text)
    except Quarantined as problem:
        return ParsedRow(line, {}, text, problem)
    except RecursionError:
        return ParsedRow(line, {}, text, Quarantined(QuarantineReason.BAD_JSON, "nested too deeply"))
    except ValueError as error:
        return ParsedRow(line, {}, text, Quarantined(QuarantineReason.BAD_JSON, str(error)))
    if not isinstance(value, dict):
        return ParsedRow(
            line, {}, text, Quarantined(QuarantineReason.NOT_AN_OBJECT, f"the row is {type(value).__name__}")
        )
    return ParsedRow(line, value, text)


def _text_key(content: bytes) -> bytes:
    return hashlib.sha256(b"text:" + content).digest()
