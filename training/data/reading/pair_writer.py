"""Assign pairs to splits, write pairs and quarantined rows, and count both.

    preferences.parquet  row, prompt, chosen, rejected (messages), tools, chat_template_kwargs, split, source, line,
                         source_name, identity (PairIdentity, in hexadecimal)
    quarantine.parquet   source, line, reason, detail, text (the row as it was read)

A prompt is in one split only. It is validation if the prompt occurs in a held-out source, so these sources are read first.
Else the prompt's hash decides, so the split stays when data grows. The same holds for the `fraction` of a source.

Duplicates are kept, unless the recipe drops them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.config.json_object import JsonObject
from training.contract.errors import DataError
from training.contract.files.local_files import DataFile
from training.contract.identity.fingerprint import StreamFingerprint, value_digest
from training.contract.protocol.details import QuarantinedRow, RowCounts, RowsDetails
from training.data.formats.columns import ColumnMapping
from training.data.formats.quarantine import Quarantined
from training.data.reading.converted_pairs import ConvertedPair
from training.data.reading.duplicates import Duplicates
from training.data.reading.rows import ParsedRow

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
    """Return the split of a prompt: `validation` if its sha256, as a number in [0, 1), is below the fraction."""
    number = int.from_bytes(prompt_sha256, "big")
    return "validation" if number < int(validation_fraction * 2**256) else "train"


def is_sampled(prompt_sha256: bytes, fraction: float) -> bool:
    """Return whether a prompt is in this fraction of its source. A larger fraction has it too.

    The second half of the sha256 decides, because the first half decides the split.
    """
    return int.from_bytes(prompt_sha256[16:], "big") < int(fraction * 2**128)


@dataclass(frozen=True)
class Source:
    """How to read `data.sources[number]` of the recipe, counted from 0. `format` may be `auto`."""

    number: int
    format: str
    columns: ColumnMapping
    held_out: bool
    fraction: float
    name: str | None


@dataclass(frozen=True)
class SourceFile:
    """A file to read, with its source."""

    file: DataFile
    source: Source


@dataclass
class PairWriter:
    """Writes pairs and quarantined rows to the artifact's files, and counts them."""

    folder: Path
    validation_fraction: float
    duplicates: Duplicates
    pairs: StreamFingerprint = field(default_factory=lambda: StreamFingerprint("raw_preferences"))
    refused: list[bytes] = field(default_factory=list)
    first_refused: dict[str, str] = field(default_factory=dict)  # by reason
    held_out_prompts: set[bytes] = field(default_factory=set)
    formats: dict[str, str] = field(default_factory=dict)
    rows_of_file: Counter[str] = field(default_factory=Counter)
    pairs_of_source: Counter[int] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[JsonObject] = field(default_factory=list)
    quarantine_examples: list[QuarantinedRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pairs = _ParquetRows(self.folder / PREFERENCES_FILE, PREFERENCES_SCHEMA)
        self._quarantine = _ParquetRows(self.folder / QUARANTINE_FILE, QUARANTINE_SCHEMA)

    def close(self) -> None:
        self._pairs.close()
        self._quarantine.close()

    def keep(self, pair: ConvertedPair, file: SourceFile, line: int) -> None:
        source = file.source
        if not is_sampled(pair.prompt_digest, source.fraction):
            self.left_out += 1
            return
        split = self._split(pair.prompt_digest, source.held_out)
        self.pairs_of_source[source.number] += 1
        if self.duplicates.drops(pair.identity, f"{file.file.name}, line {line}"):
            return
        origin: JsonObject = {"split": split, "line": line}
        if source.name is not None:
            origin["source_name"] = source.name
        turns, identity = pair.turns, pair.identity.identity.hex()
        row = {"row": self.pairs.count, **turns, **origin, "source": file.file.name, "identity": identity}
        self._pairs.add(row)
        self.pairs.add(pair.digest(origin))
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
            self.quarantine_examples.append(QuarantinedRow.model_validate({**row, "text": text[:_EXAMPLE_CHARACTERS]}))

    def _split(self, prompt_sha256: bytes, held_out: bool) -> str:
        if held_out:
            self.held_out_prompts.add(prompt_sha256)
        is_held_out = prompt_sha256 in self.held_out_prompts
        return "validation" if is_held_out else split_of(prompt_sha256, self.validation_fraction)

    def check_not_empty(self) -> None:
        if self.pairs.count:
            return
        counts = [*self.reasons.most_common(), *([("left out by `fraction`", self.left_out)] if self.left_out else [])]
        causes = ", ".join(f"{count} x {reason}" for reason, count in counts) or "0 rows"
        first = ""
        for row in self.quarantine_examples[:1]:
            first = f"; the first: {row.source}, line {row.line}: {row.detail}"
        raise DataError(f"no preference pair was found in {', '.join(self.formats)} ({causes}){first}", "no-pairs")

    def check_no_empty_source(self, inputs: Sequence[SourceFile]) -> None:
        """Raise DataError if a source lacks rows, or is held out and lacks pairs.

        Its export may have failed. Training and evaluation would use only the other sources.
        """
        filled = {file.source.number for file in inputs if self.rows_of_file[file.file.name]}
        for file in inputs:
            source, name = file.source, file.file.name
            if source.number not in filled:
                raise DataError(
                    f"`data.sources.{source.number}` ({name} ...) has 0 rows; write its rows again, or remove it from "
                    "`data.sources` to train on the other sources only",
                    "empty-source",
                )
            if source.held_out and not self.pairs_of_source[source.number]:
                part = f" in its `fraction` of {source.fraction}" if source.fraction < 1 else ""
                raise DataError(
                    f"`data.sources.{source.number}` ({name} ...) is held out, but has 0 pairs{part}; add pairs to it, or "
                    "remove `held_out`",
                    "held-out-without-pairs",
                )

    def fingerprint(self) -> str:
        """Return the fingerprint of the pairs, then the quarantined rows, in order. Call it once, at the end."""
        for refused in self.refused:
            self.pairs.add(refused)
        return self.pairs.fingerprint()

    def details(self) -> RowsDetails:
        pairs, quarantined, duplicates = self.pairs.count, self.reasons.total(), self.duplicates
        counts = RowCounts(
            pairs=pairs,
            quarantined=quarantined,
            train=self.splits["train"],
            validation=self.splits["validation"],
            rows_read=pairs + quarantined + self.left_out + duplicates.dropped,
            left_out=self.left_out,
            duplicates=duplicates.count,
            conflicting=duplicates.conflicting,
        )
        return RowsDetails(
            counts=counts,
            formats=self.formats,
            reasons=dict(self.reasons.most_common()),
            quarantine_examples=tuple(self.quarantine_examples),
            examples=tuple(self.examples),
        )


class _ParquetRows:
    """A Parquet file that is written a few thousand rows at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer, self._schema = pq.ParquetWriter(path, schema), schema
        self._rows: list[JsonObject] = []

    def add(self, row: JsonObject) -> None:
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
