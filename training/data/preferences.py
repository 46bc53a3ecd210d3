"""The `preferences` job: every row of every source becomes a pair in one schema, or a line in quarantine.

    preferences.parquet  row, prompt, chosen, rejected (messages), tools, chat_template_kwargs, split, source, line, source_name
    quarantine.parquet   source, line, reason, detail, text (the row as it was read)

Rows read = pairs + quarantined + left out by the `fraction` of their source, always. Pairs with the same prompt are in the same
split: validation if the prompt occurs in a source that is held out, which is why such sources are read first; else the split
follows from the prompt's hash alone, and so does whether a fraction leaves it out: both stay as data grows. The fingerprint
covers the pairs with their splits, line numbers and the names of their sources, and the quarantined rows, in order, not the
names of the files they came from.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.contract.errors import DataError
from training.contract.events import EventWriter, Progress
from training.contract.fingerprint import fingerprint_of_stream, value_digest
from training.contract.job import Job
from training.contract.recipe import DataSource
from training.contract.recipe_files import DataFile
from training.contract.store import Made
from training.data.formats import FORMATS, detect
from training.data.hub_files import hub_files
from training.data.messages import Message, Pair, message
from training.data.quarantine import Quarantined, Reason
from training.data.readers import Record, read_records
from training.distributed import Group

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
    ]
)
QUARANTINE_SCHEMA = pa.schema(
    [(name, pa.int64() if name == "line" else pa.string()) for name in ("source", "line", "reason", "detail", "text")]
)
_WRITTEN_ROWS = 4096
_DETECTION_ROWS = 32
_QUARANTINE_EXAMPLES, _EXAMPLE_CHARACTERS, _PAIR_EXAMPLES = 20, 300, 3


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Read, convert and split the sources of `job.locations`.

    Its `files` lists those of each local source. Raises DataError if they hold no pair, or a file no longer has the sha256
    that it was listed with.
    """
    assert group.world == 1, "reading preferences is the work of one process"
    sources = [DataSource.model_validate(source) for source in job.locations["sources"]]
    listed = _listed(job, sources, events)
    events.phase("reading preferences")
    settings = {"fractions": [1.0] * len(sources), "names": [None] * len(sources), **job.settings}
    columns = (settings[name] for name in ("formats", "held_out", "fractions", "names"))
    by_source = enumerate(zip(listed, *columns, strict=True))
    inputs = _distinctly_named([_Input(file, n, *rest) for n, (files, *rest) in by_source for file in files])
    with contextlib.closing(_Collector(job.staging, job.settings["validation_fraction"])) as collector:
        progress = Progress(events, len(inputs), "files")
        for each in sorted(inputs, key=lambda each: not each.held_out):
            _collect(each, collector)
            progress.advance()
    collector.refuse_if_empty()
    collector.refuse_empty_held_out(inputs)
    for reason, count in collector.reasons.most_common():
        events.note(f"{count} rows in quarantine: {reason}")
    if collector.left_out:
        events.note(f"{collector.left_out} rows left out by the `fraction` of their source")
    return Made(fingerprint_of_stream("raw_preferences", [*collector.digests, *collector.refused]), collector.details())


def split_of(prompt_sha256: bytes, validation_fraction: float) -> str:
    """The split of a prompt: its sha256, read as a number in [0, 1), is compared with the fraction."""
    number = int.from_bytes(prompt_sha256, "big")
    return "validation" if number < int(validation_fraction * 2**256) else "train"


def is_drawn(prompt_sha256: bytes, fraction: float) -> bool:
    """Whether a prompt is in this fraction of its source, and so in every larger one.

    By the second half of its sha256, since the first decides the split.
    """
    return int.from_bytes(prompt_sha256[16:], "big") < int(fraction * 2**128)


@dataclass(frozen=True)
class _Input:
    """A file to read. What follows is of its source: number, format, which may be `auto`, `held_out`, `fraction` and name."""

    file: DataFile
    source: int
    format: str
    held_out: bool
    fraction: float
    source_name: str | None


@dataclass
class _Collector:
    """Writes pairs and quarantined rows as they come, and counts them."""

    folder: Path
    validation_fraction: float
    digests: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)
    held_out_prompts: set[bytes] = field(default_factory=set)
    formats: dict[str, str] = field(default_factory=dict)
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

    def keep(self, pair: Pair, given: _Input, line: int) -> None:
        digest = _digest(pair.prompt)
        if not is_drawn(digest, given.fraction):
            self.left_out += 1
            return
        split = self._split(digest, given.held_out)
        self.pairs_of_source[given.source] += 1
        turns: dict[str, Any] = {part: list(getattr(pair, part)) for part in ("prompt", "chosen", "rejected")}
        if pair.tools:
            turns["tools"] = pair.tools
        if pair.chat_template_kwargs:
            turns["chat_template_kwargs"] = pair.chat_template_kwargs
        origin: dict[str, Any] = {"split": split, "line": line}
        if given.source_name is not None:
            origin["source_name"] = given.source_name
        self._pairs.add({"row": len(self.digests), **turns, **origin, "source": given.file.name})
        self.digests.append(value_digest(turns | origin))
        self.splits[split] += 1
        if len(self.examples) < _PAIR_EXAMPLES:
            self.examples.append(turns)

    def set_aside(self, problem: Quarantined, source: str, record: Record) -> None:
        reason, text = problem.reason.value, record.text
        row = {"source": source, "line": record.line, "reason": reason, "detail": problem.detail, "text": text}
        self._quarantine.add(row)
        self.refused.append(value_digest([record.line, reason, text]))
        self.reasons[reason] += 1
        if len(self.quarantine_examples) < _QUARANTINE_EXAMPLES:
            self.quarantine_examples.append({**row, "text": text[:_EXAMPLE_CHARACTERS]})

    def _split(self, prompt_sha256: bytes, held_out: bool) -> str:
        if held_out:
            self.held_out_prompts.add(prompt_sha256)
        is_held_out = prompt_sha256 in self.held_out_prompts
        return "validation" if is_held_out else split_of(prompt_sha256, self.validation_fraction)

    def refuse_if_empty(self) -> None:
        if self.digests:
            return
        counted = [*self.reasons.most_common(), *([("left out by `fraction`", self.left_out)] if self.left_out else [])]
        found = ", ".join(f"{count} x {reason}" for reason, count in counted) or "no row at all"
        first = f"; the first: {self.quarantine_examples[0]['detail']}" if self.quarantine_examples else ""
        raise DataError(f"there is no usable preference pair in {', '.join(self.formats)} ({found}){first}")

    def refuse_empty_held_out(self, inputs: Sequence[_Input]) -> None:
        """Raises DataError for a source that is held out and has no pair: the evaluation would be of other pairs alone."""
        for each in inputs:
            if each.held_out and not self.pairs_of_source[each.source]:
                part = f" in its `fraction` of {each.fraction}" if each.fraction < 1 else ""
                raise DataError(
                    f"`data.sources.{each.source}` ({each.file.name} ...) is held out, and none of its rows is a usable pair"
                    f"{part}; name one with pairs, or take `held_out` away"
                )

    def details(self) -> dict[str, Any]:
        pairs, quarantined = len(self.digests), self.reasons.total()
        return {
            "counts": {
                "pairs": pairs,
                "quarantined": quarantined,
                "train": self.splits["train"],
                "validation": self.splits["validation"],
                "rows_read": pairs + quarantined + self.left_out,
                "left_out": self.left_out,
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


def _listed(job: Job, sources: Sequence[DataSource], events: EventWriter) -> list[list[DataFile]]:
    """The files of each source: as listed and hashed before, or those of a data set of the hub, downloaded now."""
    return [
        hub_files(source, events) if source.path is None else [DataFile.model_validate(file) for file in files]
        for source, files in zip(sources, job.locations["files"], strict=True)
    ]


def _distinctly_named(inputs: list[_Input]) -> list[_Input]:
    """Prefix the names that files of several sources share with their numbers."""
    names = Counter(each.file.name for each in inputs)
    numbered = [each.file.model_copy(update={"name": f"{n}:{each.file.name}"}) for n, each in enumerate(inputs, 1)]
    return [
        replace(each, file=file) if names[each.file.name] > 1 else each
        for each, file in zip(inputs, numbered, strict=True)
    ]


def _collect(given: _Input, collector: _Collector) -> None:
    """Convert every record of a file, in the format wanted or the one detected from its first rows."""
    file = given.file
    name, records = _recognize(file, given.format)
    collector.formats[file.name] = name
    for record in records:
        try:
            pair = _convert(record, name)
        except Quarantined as problem:
            collector.set_aside(problem, file.name, record)
        else:
            collector.keep(pair, given, record.line)


def _convert(record: Record, name: str) -> Pair:
    if record.problem is not None:
        raise record.problem
    try:
        return FORMATS[name].convert(record.value)
    except RecursionError:
        raise Quarantined(Reason.BAD_JSON, "nested too deeply") from None


def _recognize(file: DataFile, wanted: str) -> tuple[str, Iterator[Record]]:
    """The format of `file`, and all of its records, those that were read to detect it included."""
    records = read_records(file)
    if wanted != "auto":
        return wanted, records
    seen: list[Record] = []
    objects = 0
    for record in records:
        seen.append(record)
        objects += record.problem is None
        if objects == _DETECTION_ROWS:
            break
    if not seen:
        return wanted, records
    if not objects:
        raise DataError(f"{file.path}: no row of it can be read; line {seen[0].line}: {seen[0].problem}")
    name = detect([record.value for record in seen if record.problem is None], str(file.path))
    return name, itertools.chain(seen, records)
