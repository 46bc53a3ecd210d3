"""What becomes of rows: pairs, each in its split, and quarantined rows, in two files as they come, and counts of both.

    preferences.parquet  row, prompt, chosen, rejected (messages), tools, chat_template_kwargs, split, source, line,
                         source_name, identity (of what the pair says, in hexadecimal)
    quarantine.parquet   source, line, reason, detail, text (the row as it was read)

Pairs with the same prompt are in the same split: validation if the prompt occurs in a source that is held out, which is why
such sources are read first; else the split follows from the prompt's hash alone, and so does whether a fraction leaves it out:
both stay as data grows.

A pair that repeats an earlier one is kept too, unless the recipe says that duplicates are dropped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import DataError
from training.contract.files.local_files import DataFile
from training.contract.identity.fingerprint import value_digest
from training.data.formats.columns import ColumnMapping
from training.data.formats.messages import Message, Pair, message
from training.data.formats.quarantine import Quarantined
from training.data.reading.duplicates import Duplicates, PairIdentity
from training.data.reading.readers import ParsedRow

PREFERENCES_FILE, QUARANTINE_FILE = "preferences.parquet", "quarantine.parquet"

_MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_MESSAGES = pa.list_(pa.struct([(name, pa.string()) for name in _MESSAGE_FIELDS]))
PREFERENCES_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("prompt", _MESSAGES),
        ("chosen", _MESSAGES),
        ("rejected", _MESSAGES),
        ("tools", pa.string()),
        ("chat_template_kwargs", pa.string()),
        ("split", pa.string()),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("source_name", pa.string()),
        ("identity", pa.string()),
    ]
)
QUARANTINE_SCHEMA = pa.schema(
    [(name, pa.int64() if name == "line" else pa.string()) for name in ("source", "line", "reason", "detail", "text")]
)
_WRITTEN_ROWS = 4096
_QUARANTINE_EXAMPLES, _EXAMPLE_CHARACTERS, _PAIR_EXAMPLES = 20, 300, 3


def split_of(prompt_sha256: bytes, validation_fraction: float) -> str:
    """The split of a prompt: its sha256, read as a number in [0, 1), is compared with the fraction."""
    number = int.from_bytes(prompt_sha256, "big")
    return "validation" if number < int(validation_fraction * 2**256) else "train"


def is_sampled(prompt_sha256: bytes, fraction: float) -> bool:
    """Whether a prompt is in this fraction of its source, and so in every larger one.

    By the second half of its sha256, since the first decides the split.
    """
    return int.from_bytes(prompt_sha256[16:], "big") < int(fraction * 2**128)


@dataclass(frozen=True)
class SourceSettings:
    """What a recipe says of a source, the `number`th of its list, counted from 0; `format` may be `auto`."""

    number: int
    format: str
    columns: ColumnMapping
    held_out: bool
    fraction: float
    name: str | None


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and whose it is."""

    file: DataFile
    source: SourceSettings


@dataclass
class PairWriter:
    """Writes pairs and quarantined rows as they come, and counts them."""

    folder: Path
    validation_fraction: float
    duplicates: Duplicates
    digests: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)
    first_refused: dict[str, str] = field(default_factory=dict)  # by reason
    held_out_prompts: set[bytes] = field(default_factory=set)
    formats: dict[str, str] = field(default_factory=dict)
    rows_of_file: Counter[str] = field(default_factory=Counter)
    pairs_of_source: Counter[int] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    quarantine_examples: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pairs = _ParquetRows(self.folder / PREFERENCES_FILE, PREFERENCES_SCHEMA)
        self._quarantine = _ParquetRows(self.folder / QUARANTINE_FILE, QUARANTINE_SCHEMA)

    def close(self) -> None:
        self._pairs.close()
        self._quarantine.close()

    def keep(self, pair: Pair, given: SourceFile, line: int) -> None:
        digest = _digest(pair.prompt)
        if not is_sampled(digest, given.source.fraction):
            self.left_out += 1
            return
        split = self._split(digest, given.source.held_out)
        self.pairs_of_source[given.source.number] += 1
        turns: dict[str, Any] = {part: list(getattr(pair, part)) for part in ("prompt", "chosen", "rejected")}
        if pair.tools:
            turns["tools"] = pair.tools
        if pair.chat_template_kwargs:
            turns["chat_template_kwargs"] = pair.chat_template_kwargs
        said = PairIdentity.of(turns)
        if self.duplicates.drops(said, f"{given.file.name}, line {line}"):
            return
        origin: dict[str, Any] = {"split": split, "line": line}
        if given.source.name is not None:
            origin["source_name"] = given.source.name
        row = {"row": len(self.digests), **turns, **origin, "source": given.file.name, "identity": said.identity.hex()}
        self._pairs.add(row)
        self.digests.append(value_digest(turns | origin))
        self.splits[split] += 1
        if len(self.examples) < _PAIR_EXAMPLES:
            self.examples.append(turns)

    def set_aside(self, problem: Quarantined, source: str, record: ParsedRow) -> None:
        reason, text = problem.reason.value, record.text
        row = {"source": source, "line": record.line, "reason": reason, "detail": problem.detail, "text": text}
        self._quarantine.add(row)
        self.refused.append(value_digest([record.line, reason, text]))
        self.reasons[reason] += 1
        self.first_refused.setdefault(reason, f"{source}, line {record.line}")
        if len(self.quarantine_examples) < _QUARANTINE_EXAMPLES:
            self.quarantine_examples.append({**row, "text": text[:_EXAMPLE_CHARACTERS]})

    def _split(self, prompt_sha256: bytes, held_out: bool) -> str:
        if held_out:
            self.held_out_prompts.add(prompt_sha256)
        is_held_out = prompt_sha256 in self.held_out_prompts
        return "validation" if is_held_out else split_of(prompt_sha256, self.validation_fraction)

    def check_not_empty(self) -> None:
        if self.digests:
            return
        counted = [*self.reasons.most_common(), *([("left out by `fraction`", self.left_out)] if self.left_out else [])]
        found = ", ".join(f"{count} x {reason}" for reason, count in counted) or "no row at all"
        first = ""
        for row in self.quarantine_examples[:1]:
            first = f"; the first: {row['source']}, line {row['line']}: {row['detail']}"
        raise DataError(f"there is no usable preference pair in {', '.join(self.formats)} ({found}){first}")

    def check_no_empty_source(self, inputs: Sequence[SourceFile]) -> None:
        """Raises DataError for a source that has no row, or is held out and has no pair.

        An export may have failed, and what is left would be trained on; the evaluation would be of other pairs alone.
        """
        filled = {each.source.number for each in inputs if self.rows_of_file[each.file.name]}
        for each in inputs:
            source = each.source
            if source.number not in filled:
                raise DataError(
                    f"`data.sources.{source.number}` ({each.file.name} ...) has no row at all, and without it the rest would "
                    "be trained on; write its rows again, or take it out of `data.sources` for as long as it has none"
                )
            if source.held_out and not self.pairs_of_source[source.number]:
                part = f" in its `fraction` of {source.fraction}" if source.fraction < 1 else ""
                raise DataError(
                    f"`data.sources.{source.number}` ({each.file.name} ...) is held out, and none of its rows is a usable pair"
                    f"{part}; name one with pairs, or take `held_out` away"
                )

    def details(self) -> dict[str, Any]:
        pairs, quarantined, duplicates = len(self.digests), self.reasons.total(), self.duplicates
        return {
            "counts": {
                "pairs": pairs,
                "quarantined": quarantined,
                "train": self.splits["train"],
                "validation": self.splits["validation"],
                "rows_read": pairs + quarantined + self.left_out + duplicates.dropped,
                "left_out": self.left_out,
                "duplicates": duplicates.count,
                "conflicting": duplicates.conflicting,
            },
            "formats": self.formats,
            "reasons": dict(self.reasons.most_common()),
            "quarantine_examples": self.quarantine_examples,
            "examples": self.examples,
        }


class _ParquetRows:
    """A Parquet file, written a few thousand rows at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer, self._schema = pq.ParquetWriter(path, schema), schema
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == _WRITTEN_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows = []


def _digest(prompt: Sequence[Message]) -> bytes:
    """Of roles and contents alone: ids of calls, or reasoning, may differ where the template writes the same tokens."""
    return value_digest([message(turn["role"], turn["content"]) for turn in prompt])
