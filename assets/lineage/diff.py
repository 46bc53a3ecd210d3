"""What changed, in words: a source or a spec as it was materialized, compared with how it is now.

How it was is in the store: the derivation of its key, and for a tokenization spec the template's text and the tokenizer's
files. Comparing them needs neither torch nor transformers. The words for each asset:

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
from assets.pipeline.graph import GRAPH, Settings
from training.contract.errors import CorruptRecord, StoreError
from training.contract.identity.fingerprint import short
from training.contract.store.manifest import Derivation
from training.contract.store.store import DerivationRecord, Store

NO_RECORD = "the record of how it was made is no longer in the store"
CORRUPT_RECORD = "the record of how it was made is corrupt; a run mends it"
_MOST_FILES = 5


def changes_since(store: Store, key: str | None, found: ResolvedInput) -> list[str]:
    """How `found` differs from the artifact of the same asset whose derivation has `key`; empty if in nothing."""
    try:
        record = None if key is None else store.record(found.asset, key)
    except CorruptRecord:
        return [CORRUPT_RECORD]
    if record is None:
        return [NO_RECORD]
    words = list(_code_version(record.derivation, found.derivation.code_version))
    match found:
        case ResolvedData():
            words += _data_changes(record, found, _rows_as_recorded(store, found))
        case ResolvedModel():
            words += _model_changes(record, found)
        case ResolvedTokenizer():
            words += _tokenization_changes(store, record, found)
        case ResolvedRelease():
            words += release_changes(store, record, found)
        case _:
            words += setting_changes(record.derivation.settings, found.derivation.settings)
    return words


def own_changes(before: Derivation, version: str, settings: Settings) -> list[str]:
    """How an asset's algorithm of `version`, and its own `settings`, differ from those of `before`, how it was made.

    Fields that come out of a spec are the spec's to explain.
    """
    fields = setting_changes(before.settings, settings) if GRAPH[before.kind].spec is None else ()
    return [*_code_version(before, version), *fields]


def _code_version(before: Derivation, now: str) -> Iterator[str]:
    if before.code_version != now:
        yield f"code version {before.code_version} -> {now}"


def _rows_as_recorded(store: Store, found: ResolvedData) -> dict[str, int | None] | None:
    """The rows of `found` if it was recorded, so that they are not counted again."""
    try:
        recorded = store.record(found.asset, found.derivation.key)
    except CorruptRecord:
        return None
    return None if recorded is None else recorded.details.get("rows")


def _data_changes(record: DerivationRecord, found: ResolvedData, rows: dict[str, int | None] | None) -> Iterator[str]:
    old, new = record.derivation.settings["sources"], found.identity
    old_files, new_files = named_files(old), named_files(new)
    known = record.details.get("rows", {})
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in new_files:
            yield f"{name} removed"
        elif name not in old_files:
            yield f"{name} added"
        elif old_files[name]["sha256"] != new_files[name]["sha256"]:
            rows = rows or found.count_rows()
            yield f"{name} differs{_row_counts(known.get(name), rows.get(name))}"
    yield from _hub_changes(_by_number(old), _by_number(new), [source["revision"] for source in found.hubs])
    if old_files.keys() == new_files.keys() and _divided(old) != _divided(new):
        yield "the order of the files, or how the sources divide them, changed"


def _divided(sources: list[Any]) -> list[list[str] | None]:
    """The names of each source's files, in order; None for a data set of the hub."""
    return [[file["name"] for file in source] if isinstance(source, list) else None for source in sources]


def _hub_changes(old: Mapping[str, Any], new: Mapping[str, Any], commits: Sequence[str]) -> Iterator[str]:
    """How the data sets of the hub differ: which they are, and the files of those that stayed."""
    whole = [{name: {**hub, "files": None} for name, hub in hubs.items()} for hubs in (old, new)]
    yield from setting_changes(*whole)
    for (name, about), commit in zip(new.items(), commits, strict=True):
        if name not in old or old[name]["hub"] != about["hub"]:
            continue
        was, now = old[name]["files"], about["files"]
        words = [
            f"{file} {'removed' if file not in now else 'added' if file not in was else 'differs'}"
            for file in sorted(was.keys() | now.keys())
            if was.get(file) != now.get(file)
        ]
        if words:
            more = [f"and {len(words) - _MOST_FILES:,} more"] if len(words) > _MOST_FILES else []
            yield f"{about['hub']} at commit {short(commit)}: {', '.join([*words[:_MOST_FILES], *more])}"


def _by_number(sources: list[Any]) -> dict[str, Any]:
    hubs = [source for source in sources if isinstance(source, dict)]
    return {"hub data set" if len(hubs) == 1 else f"hub data set {n}": hub for n, hub in enumerate(hubs, 1)}


def _row_counts(before: int | None, now: int | None) -> str:
    return "" if before is None or now is None else f" ({before:,} -> {now:,} rows read)"


def _model_changes(record: DerivationRecord, found: ResolvedModel) -> Iterator[str]:
    before, now, located = record.derivation.settings, found.derivation.settings, found.located
    if located is None:
        yield f"{now['hub']} is at commit {short(now['commit'])}, which is not downloaded yet"
        return
    at = f" at commit {short(located.commit)}" if located.commit else ""
    if before["weights"] != now["weights"]:
        names = sorted(file.name for file in located.folder.glob("*.safetensors"))
        yield f"{names[0]} differs{at}" if len(names) == 1 else f"the weights in {len(names)} files differ{at}"
    for words in setting_changes(before["config"], now["config"]):
        yield f"config {words}"


def _tokenization_changes(store: Store, record: DerivationRecord, found: ResolvedTokenizer) -> Iterator[str]:
    before, now = dict(record.derivation.settings), dict(found.derivation.settings)
    old_files, new_files = ({**s.pop("files"), "template": s.pop("chat_template")} for s in (before, now))
    if old_files != new_files:
        try:
            artifact = store.open("tokenization_spec", record.fingerprint)
        except StoreError:
            yield "tokenizer or chat template changed; how they were is no longer in the store"
        else:
            differing = {n for n in old_files.keys() | new_files.keys() if old_files.get(n) != new_files.get(n)}
            yield from tokenizer_changes(artifact, found.located, differing)
    beside = (each.pop("config", {}) for each in (before, now))
    yield from (f"config.json beside the tokenizer: {words}" for words in setting_changes(*beside))
    yield from setting_changes(before, now)
