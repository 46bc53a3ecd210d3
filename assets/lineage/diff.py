"""Changes of a source or a spec since its materialization, as text.

The earlier state is in the store: the derivation of its key and, for a tokenization spec, the template's text and the
tokenizer's files. The comparison needs neither torch nor transformers. Examples by asset:

    preference_source    preferences.jsonl differs (1,092 -> 1,147 rows read); extra.jsonl added
                         org/pairs at commit cd34: data/train.jsonl differs
    base_model           model.safetensors differs; config rope_theta 10000.0 -> 500000.0
    tokenization_spec    chat template changed: line 14; tokenizer gained token <|tool|>; max_length 128 -> 256
    *_spec               loss.beta 0.1 -> 0.2
    every asset          code version 1 -> 2
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assets.inputs.current import (
    ResolvedData,
    ResolvedInput,
    ResolvedModel,
    ResolvedRelease,
    ResolvedTokenizer,
    named_files,
)
from assets.lineage.release_diff import release_changes
from assets.lineage.settings_diff import setting_changes
from assets.lineage.tokenizer_diff import tokenizer_changes
from assets.pipeline.graph import GRAPH
from training.contract.config.json_object import JsonObject
from training.contract.errors import CorruptRecord, StoreError
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import TOKENIZATION_SPEC
from training.contract.protocol.details import SourceDetails
from training.contract.protocol.settings import SourcesSettings
from training.contract.store.artifact import DerivationRecord
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

NO_RECORD = "the record of how it was made is no longer in the store"
CORRUPT_RECORD = "the record of how it was made is corrupt; a run repairs it"
_MOST_FILES = 5


def changes_since(store: Store, key: str | None, found: ResolvedInput) -> list[str]:
    """Return how `found` differs from the artifact of the same asset whose derivation has `key`; empty if equal."""
    try:
        record = None if key is None else store.record(found.asset, key)
    except CorruptRecord:
        return [CORRUPT_RECORD]
    if record is None:
        return [NO_RECORD]
    changes = list(_code_version_changes(record.derivation, found.derivation.code_version))
    match found:
        case ResolvedData():
            changes += _data_changes(record, found, _recorded_rows(store, found))
        case ResolvedModel():
            changes += _model_changes(record, found)
        case ResolvedTokenizer():
            changes += _tokenization_changes(store, record, found)
        case ResolvedRelease():
            changes += release_changes(store, record, found)
        case _:
            changes += setting_changes(record.derivation.settings, found.derivation.settings)
    return changes


def own_changes(before: Derivation, version: str, settings: JsonObject) -> list[str]:
    """Return how an asset's code `version` and `settings` differ from the derivation `before`.

    Settings from a spec are left out: they are causes of the spec.
    """
    fields = setting_changes(before.settings, settings) if GRAPH[before.kind].spec is None else ()
    return [*_code_version_changes(before, version), *fields]


def _code_version_changes(before: Derivation, now: str) -> Iterator[str]:
    if before.code_version != now:
        yield f"code version {before.code_version} -> {now}"


def _recorded_rows(store: Store, found: ResolvedData) -> dict[str, int | None] | None:
    """Return the row counts of `found` from its record, to avoid counting again; None without a record."""
    try:
        record = store.record(found.asset, found.derivation.key)
    except CorruptRecord:
        return None
    return None if record is None else _rows_of(record)


def _rows_of(record: DerivationRecord) -> dict[str, int | None]:
    return SourceDetails.model_validate(record.details).rows


def _data_changes(record: DerivationRecord, found: ResolvedData, rows: dict[str, int | None] | None) -> Iterator[str]:
    recorded = SourcesSettings.model_validate(record.derivation.settings)
    old, new = list(recorded.sources), found.identity
    old_files, new_files = named_files(old), named_files(new)
    old_rows = _rows_of(record)
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in new_files:
            yield f"{name} removed"
        elif name not in old_files:
            yield f"{name} added"
        elif old_files[name]["sha256"] != new_files[name]["sha256"]:
            rows = rows or found.count_rows()
            yield f"{name} differs{_row_counts(old_rows.get(name), rows.get(name))}"
    yield from _hub_changes(_number_hubs(old), _number_hubs(new), [source.revision or "" for source in found.hubs])
    if old_files.keys() == new_files.keys() and _source_files(old) != _source_files(new):
        yield "the order of the files, or how the sources divide them, changed"


def _source_files(sources: list[Any]) -> list[list[str] | None]:
    """Return the names of each source's files, in order; None for a data set of the hub."""
    return [[file["name"] for file in source] if isinstance(source, list) else None for source in sources]


def _hub_changes(old: Mapping[str, Any], new: Mapping[str, Any], commits: Sequence[str]) -> Iterator[str]:
    """Yield changes of the hub's data sets: of their settings, and of files if the repository is the same."""
    without_files = [{name: {**hub, "files": None} for name, hub in hubs.items()} for hubs in (old, new)]
    yield from setting_changes(*without_files)
    for (name, hub), commit in zip(new.items(), commits, strict=True):
        if name not in old or old[name]["hub"] != hub["hub"]:
            continue
        old_files, new_files = old[name]["files"], hub["files"]
        changes = [
            f"{file} {'removed' if file not in new_files else 'added' if file not in old_files else 'differs'}"
            for file in sorted(old_files.keys() | new_files.keys())
            if old_files.get(file) != new_files.get(file)
        ]
        if changes:
            more = [f"and {len(changes) - _MOST_FILES:,} more"] if len(changes) > _MOST_FILES else []
            yield f"{hub['hub']} at commit {short(commit)}: {', '.join([*changes[:_MOST_FILES], *more])}"


def _number_hubs(sources: list[Any]) -> JsonObject:
    """Return the sources of the hub by a name for display, numbered if there are several."""
    hubs = [source for source in sources if isinstance(source, dict)]
    return {"hub data set" if len(hubs) == 1 else f"hub data set {n}": hub for n, hub in enumerate(hubs, 1)}


def _row_counts(before: int | None, now: int | None) -> str:
    return "" if before is None or now is None else f" ({before:,} -> {now:,} rows read)"


def _model_changes(record: DerivationRecord, found: ResolvedModel) -> Iterator[str]:
    before, now, located = record.derivation.settings, found.derivation.settings, found.located
    if located is None:
        yield f"{now['hub']} is at commit {short(now['commit'])}, which is not downloaded yet"
        return
    commit = f" at commit {short(located.commit)}" if located.commit else ""
    if before["weights"] != now["weights"]:
        names = sorted(file.name for file in located.folder.glob("*.safetensors"))
        yield f"{names[0]} differs{commit}" if len(names) == 1 else f"the weights in {len(names)} files differ{commit}"
    for change in setting_changes(before["config"], now["config"]):
        yield f"config {change}"


def _tokenization_changes(store: Store, record: DerivationRecord, found: ResolvedTokenizer) -> Iterator[str]:
    before, now = dict(record.derivation.settings), dict(found.derivation.settings)
    old_files, new_files = ({**s.pop("files"), "template": s.pop("chat_template")} for s in (before, now))
    if old_files != new_files:
        try:
            artifact = store.open(TOKENIZATION_SPEC, record.fingerprint)
        except StoreError:
            yield "tokenizer or chat template changed; how they were is no longer in the store"
        else:
            differing = {n for n in old_files.keys() | new_files.keys() if old_files.get(n) != new_files.get(n)}
            yield from tokenizer_changes(artifact, found.located, differing)
    configs = (settings.pop("config", {}) for settings in (before, now))
    yield from (f"config.json beside the tokenizer: {change}" for change in setting_changes(*configs))
    yield from setting_changes(before, now)
