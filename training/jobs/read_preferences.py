"""The `preferences` job: every row of every source becomes a pair in one schema, or a line in quarantine.

Rows read = pairs + quarantined + left out by the `fraction` of their source + dropped duplicates, always. The fingerprint
covers the pairs with their splits, line numbers and the names of their sources, and the quarantined rows, in order, not the
names of the files they came from.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from training.contract.config.data_source import DataSource, settings_by_source
from training.contract.errors import DataError
from training.contract.files.local_files import DataFile, distinct_names
from training.contract.identity.fingerprint import fingerprint_of_stream
from training.contract.protocol.events import EventWriter, Progress
from training.contract.protocol.job import Job
from training.contract.store.manifest import read_manifest
from training.contract.store.store import JobResult
from training.data.formats.columns import ColumnMapping
from training.data.formats.formats import FORMATS
from training.data.formats.messages import Pair
from training.data.formats.quarantine import Quarantined, QuarantineReason, Row
from training.data.formats.ranked_responses import check_labels_from_1
from training.data.reading.duplicates import Duplicates
from training.data.reading.file_errors import check_names
from training.data.reading.format_detection import detect
from training.data.reading.hub_files import hub_files
from training.data.reading.pair_writer import PairWriter, SourceFile, SourceSettings
from training.data.reading.readers import ParsedRow, read_records
from training.distributed import Group

_DETECTION_ROWS = 32


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Read, convert and split the sources of `job.locations`.

    Its `files` lists those of each local source. Raises DataError if they hold no pair, or a file no longer has the sha256
    that it was listed with.
    """
    assert group.world == 1, "reading preferences is the work of one process"
    listed = _listed(job, events)
    events.phase("reading preferences")
    sources = [_settings(number, about) for number, about in enumerate(settings_by_source(job.settings))]
    given = zip(listed, sources, strict=True)
    inputs = _distinctly_named([SourceFile(file, source) for files, source in given for file in files])
    duplicates = Duplicates(are_dropped=job.settings["duplicates"] == "drop")
    with contextlib.closing(PairWriter(job.staging, job.settings["validation_fraction"], duplicates)) as collector:
        rows = _rows_to_read(job)
        progress = Progress(events, rows or len(inputs), "rows" if rows else "files")
        for each in sorted(inputs, key=lambda each: not each.source.held_out):
            for _ in _collect(each, collector):
                if rows:
                    progress.advance()
            if not rows:
                progress.advance()
    for source in sources:
        source.columns.check_columns_seen("the source's rows")
    collector.check_not_empty()
    collector.check_no_empty_source(inputs)
    for source in sources:
        if collector.pairs_of_source[source.number]:
            source.columns.check_columns_read()
    for each in inputs:
        if not collector.rows_of_file[each.file.name]:
            events.note(f"{each.file.name} has no row")
    for reason, count in collector.reasons.most_common():
        events.note(f"{count} rows in quarantine: {reason}, the first: {collector.first_refused[reason]}")
    if collector.left_out:
        events.note(f"{collector.left_out} rows left out by the `fraction` of their source")
    for note in duplicates.notes():
        events.note(note)
    return JobResult(
        fingerprint_of_stream("raw_preferences", [*collector.digests, *collector.refused]), collector.details()
    )


def _settings(number: int, about: Mapping[str, Any]) -> SourceSettings:
    others = {name: value for name, value in about.items() if name not in ("columns", "roles")}
    return SourceSettings(**others, number=number, columns=ColumnMapping(number, about["columns"], about["roles"]))


def _listed(job: Job, events: EventWriter) -> list[list[DataFile]]:
    """The files of each source: as listed and hashed before, or those of a data set of the hub, downloaded now."""
    sources = [DataSource.model_validate(source) for source in job.locations["sources"]]
    return [
        hub_files(source, events) if source.path is None else [DataFile.model_validate(file) for file in files]
        for source, files in zip(sources, job.locations["files"], strict=True)
    ]


def _rows_to_read(job: Job) -> int | None:
    """The rows of all files, as they were counted when the source was recorded; None where one of them could not be."""
    counts = read_manifest(job.inputs["preference_source"].folder).details["rows"].values()
    return None if None in counts else sum(counts)


def _distinctly_named(inputs: list[SourceFile]) -> list[SourceFile]:
    names = distinct_names([each.file for each in inputs])
    return [
        replace(each, file=each.file.model_copy(update={"name": name}))
        for each, name in zip(inputs, names, strict=True)
    ]


def _collect(given: SourceFile, collector: PairWriter) -> Iterator[None]:
    """Convert every record of a file, in the format wanted or the one detected from its first rows; yields after each."""
    file = given.file
    name, records = _recognize(given)
    collector.formats[file.name] = name
    for record in records:
        collector.rows_of_file[file.name] += 1
        try:
            pair = _convert(record, name, given.source.columns)
        except Quarantined as problem:
            collector.set_aside(problem, file.name, record)
        else:
            collector.keep(pair, given, record.line)
        yield


def _convert(record: ParsedRow, name: str, columns: ColumnMapping) -> Pair:
    if record.problem is not None:
        raise record.problem
    try:
        return FORMATS[name].convert(columns.watched(record.value))
    except Quarantined as problem:
        if problem.reason is QuarantineReason.BAD_UNICODE and (fault := record.undecoded):
            raise Quarantined(QuarantineReason.BAD_UNICODE, fault) from None
        raise
    except RecursionError:
        raise Quarantined(QuarantineReason.BAD_JSON, "nested too deeply") from None


def _recognize(given: SourceFile) -> tuple[str, Iterator[ParsedRow]]:
    """The format of a file, and all of its records, those that were looked at first included."""
    records, name, place = read_records(given.file), given.source.format, str(given.file.path)
    first: list[ParsedRow] = []
    rows: list[Row] = []
    for record in records:
        first.append(record)
        if record.problem is None:
            rows.append(given.source.columns.renamed(record.value))
        if len(rows) == _DETECTION_ROWS:
            break
    if name == "auto" and rows:
        try:
            name = detect(rows, place)
        except DataError:
            check_names(place, rows[0])
            given.source.columns.check_columns_seen(f"the first rows of {place}")
            raise
    elif name == "auto" and first:
        raise DataError(f"{place}: no row of it can be read; line {first[0].line}: {first[0].problem}")
    check_labels_from_1(rows, place)
    return name, itertools.chain(first, records)
