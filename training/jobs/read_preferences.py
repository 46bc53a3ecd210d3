"""The `preferences` job: convert every row of every source to a pair in one schema, or put it into quarantine.

Rows read = pairs + quarantined + left out by a source's `fraction` + dropped duplicates. The fingerprint covers the pairs
with their splits, line numbers and source names, and the quarantined rows, in order. It does not cover file names.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from training.contract.errors import DataError
from training.contract.files.local_files import DataFile, distinct_names
from training.contract.protocol.artifacts import PREFERENCE_SOURCE, AssetName
from training.contract.protocol.details import RowsDetails
from training.contract.protocol.events import EventWriter, Progress
from training.contract.protocol.job import Job
from training.contract.protocol.locations import PreferencesLocations
from training.contract.protocol.settings import PreferencesSettings, SourceSettings
from training.contract.store.artifact import JobResult
from training.contract.store.manifest import read_manifest
from training.contract.store.row_cache import PairCache
from training.contract.store.store import Store
from training.data.formats.columns import ColumnMapping
from training.data.formats.formats import FORMATS
from training.data.formats.messages import Pair
from training.data.formats.quarantine import Quarantined, QuarantineReason, Row
from training.data.formats.ranked_responses import check_labels_from_1
from training.data.reading.converted_pairs import CachedPairs, ConvertedPair, pair_rule
from training.data.reading.duplicates import Duplicates
from training.data.reading.file_errors import check_names
from training.data.reading.format_detection import detect
from training.data.reading.hub_files import hub_files
from training.data.reading.pair_writer import PairWriter, Source, SourceFile
from training.data.reading.readers import read_rows
from training.data.reading.rows import ParsedRow, UnparsedRow
from training.job_context import JobContext

_DETECTION_ROWS = 32
_BLOCK_ROWS = 1024
PreferencesJob = Job[PreferencesSettings, PreferencesLocations]
Context = JobContext[PreferencesSettings, PreferencesLocations]
FileRow = ParsedRow | UnparsedRow


def run(context: Context) -> JobResult[RowsDetails]:
    """Read, convert and split the sources of the job's locations.

    Raises DataError if they hold no pair, or if a file no longer has its listed sha256.
    """
    job, events = context.job, context.events
    assert context.group.world == 1, "the preferences job runs in one process"
    files_by_source = _list_files(job, events)
    events.phase("reading preferences")
    sources = [_source_of(number, settings) for number, settings in enumerate(job.settings.by_source)]
    inputs = _name_distinctly(
        [SourceFile(file, source) for files, source in zip(files_by_source, sources, strict=True) for file in files]
    )
    caches = _PairCaches(job, events)
    duplicates = Duplicates(are_dropped=job.settings.duplicates == "drop")
    with contextlib.closing(PairWriter(job.staging, job.settings.validation_fraction, duplicates)) as collector:
        rows = _rows_to_read(job)
        progress = Progress(events, rows or len(inputs), "rows" if rows else "files")
        for source_file in sorted(inputs, key=lambda source_file: not source_file.source.held_out):
            for count in _collect(source_file, collector, caches):
                if rows:
                    progress.advance(count)
            if not rows:
                progress.advance()
    for source in sources:
        source.columns.check_columns_seen("the source's rows")
    collector.check_not_empty()
    collector.check_no_empty_source(inputs)
    for source in sources:
        if collector.pairs_of_source[source.number]:
            source.columns.check_columns_read()
    for source_file in inputs:
        if not collector.rows_of_file[source_file.file.name]:
            events.note(f"{source_file.file.name} has no row")
    for reason, count in collector.reasons.most_common():
        events.note(f"{count} rows in quarantine: {reason}, the first: {collector.first_refused[reason]}")
    if collector.left_out:
        events.note(f"{collector.left_out} rows left out by the `fraction` of their source")
    for note in duplicates.notes():
        events.note(note)
    caches.commit()
    details = collector.details().model_copy(
        update={
            "pair_rules": tuple(sorted(caches.by_rule)),
            "cached_rows": sum(cached.known for cached in caches.by_rule.values()),
            "cache_bytes": sum(cached.cache.bytes() for cached in caches.by_rule.values()),
        }
    )
    return JobResult(collector.fingerprint(), details)


def _source_of(number: int, settings: SourceSettings) -> Source:
    return Source(
        number=number,
        format=settings.format,
        columns=ColumnMapping(number, settings.columns, settings.roles),
        held_out=settings.held_out,
        fraction=settings.fraction,
        name=settings.name,
    )


def _list_files(job: PreferencesJob, events: EventWriter) -> list[list[DataFile]]:
    """Return the files of each source: the listed and hashed local files, or a data set of the Hub, downloaded here."""
    return [
        hub_files(source, events) if source.path is None else list(files)
        for source, files in zip(job.locations.sources, job.locations.files, strict=True)
    ]


def _rows_to_read(job: PreferencesJob) -> int | None:
    """Return the number of rows of all files, counted when the sources were recorded; None if one could not be counted."""
    folder = job.inputs[AssetName.PREFERENCE_SOURCE].folder
    counts = PREFERENCE_SOURCE.parse(read_manifest(folder).details, folder).rows.values()
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _name_distinctly(inputs: list[SourceFile]) -> list[SourceFile]:
    names = distinct_names([source_file.file for source_file in inputs])
    return [
        replace(source_file, file=source_file.file.model_copy(update={"name": name}))
        for source_file, name in zip(inputs, names, strict=True)
    ]


@dataclass
class _PairCaches:
    """The pair caches of a pass, one for each format and mapping."""

    job: PreferencesJob
    events: EventWriter
    by_rule: dict[str, CachedPairs] = field(default_factory=dict)

    def of(self, name: str, columns: ColumnMapping) -> CachedPairs:
        rule = pair_rule(name, columns, self.job.code_version)
        if rule not in self.by_rule:
            self.by_rule[rule] = CachedPairs(PairCache(Store(self.job.store), rule, self.events.note))
        return self.by_rule[rule]

    def commit(self) -> None:
        for cached in self.by_rule.values():
            cached.commit()


def _collect(source_file: SourceFile, collector: PairWriter, caches: _PairCaches) -> Iterator[int]:
    """Convert every record of a file, in its set format or the one detected from its first rows. Yield numbers of records."""
    file, columns = source_file.file, source_file.source.columns
    name, records = _recognize_format(source_file)
    collector.formats[file.name] = name
    cached = caches.of(name, columns)
    for block in _blocks(records):
        for record, known in zip(block, cached.find([record.key for record in block]), strict=True):
            collector.rows_of_file[file.name] += 1
            if known is not None and columns.is_checked:
                collector.keep(known, source_file, record.line)
                continue
            parsed = record.parsed()
            try:
                pair = ConvertedPair.of(_convert(parsed, name, columns))
            except Quarantined as problem:
                collector.set_aside(problem, file.name, parsed)
                continue
            if known is None:
                cached.add(record.key, pair)
            collector.keep(pair, source_file, record.line)
        cached.end_block()
        yield len(block)


def _blocks(records: Iterator[FileRow]) -> Iterator[list[FileRow]]:
    while block := list(itertools.islice(records, _BLOCK_ROWS)):
        yield block


def _convert(record: ParsedRow, name: str, columns: ColumnMapping) -> Pair:
    if record.problem is not None:
        raise record.problem
    try:
        return FORMATS[name].convert(columns.watched(record.value))
    except Quarantined as problem:
        if problem.reason is QuarantineReason.BAD_UNICODE and (detail := record.undecoded):
            raise Quarantined(QuarantineReason.BAD_UNICODE, detail) from None
        raise
    except RecursionError:
        raise Quarantined(QuarantineReason.BAD_JSON, "nested too deeply") from None


def _recognize_format(source_file: SourceFile) -> tuple[str, Iterator[FileRow]]:
    """Return the format of a file, and all of its records, the records read for detection included."""
    unparsed, name, path = read_rows(source_file.file), source_file.source.format, str(source_file.file.path)
    first: list[ParsedRow] = []
    rows: list[Row] = []
    for record in (row.parsed() for row in unparsed):
        first.append(record)
        if record.problem is None:
            rows.append(source_file.source.columns.renamed(record.value))
        if len(rows) == _DETECTION_ROWS:
            break
    if name == "auto" and rows:
        try:
            name = detect(rows, path)
        except DataError:
            check_names(path, rows[0])
            source_file.source.columns.check_columns_seen(f"the first rows of {path}")
            raise
    elif name == "auto" and first:
        raise DataError(
            f"{path}: none of its {len(first):,} rows can be read; line {first[0].line}: {first[0].problem}; "
            "repair the file",
            "no-readable-row",
        )
    check_labels_from_1(rows, path)
    return name, itertools.chain(first, unparsed)
