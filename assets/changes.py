"""What is different, in words: a source or a spec as it was materialized against the world as it is now.

What it was stands in the store, frozen: the derivation of its key, and for a tokenization spec the template's text and the
tokenizer's files. Neither torch nor transformers is needed to compare them. The words for each kind:

    preference_source    preferences.jsonl differs (1,092 -> 1,147 rows read); extra.jsonl added
                         org/pairs at commit cd34: data/train.jsonl differs
    base_model           model.safetensors differs; config rope_theta 10000.0 -> 500000.0
    tokenization_spec    chat template changed: line 14; tokenizer gained token <|tool|>; max_length 128 -> 256
    *_spec               loss.beta 0.1 -> 0.2
    every asset          code version 1 -> 2
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

import dagster as dg

from assets.graph import GRAPH
from assets.pipeline import Pipeline
from assets.recorded import data_version, latest
from assets.tokenizer_changes import tokenizer_changes
from assets.world import Found, count_source_rows, named_files
from training.contract.errors import StoreError
from training.contract.fingerprint import short, shortened
from training.contract.manifest import Derivation
from training.contract.store import Record, Store

NO_RECORD = "the record of how it was made is no longer in the store"
_LONGEST_SECTION = 160
_MOST_FILES = 5


def changes_since(store: Store, key: str | None, found: Found) -> list[str]:
    """How `found` differs from the artifact of the same asset whose derivation has `key`; empty if in nothing."""
    record = None if key is None else store.record(found.asset, key)
    if record is None:
        return [NO_RECORD]
    if record.derivation == found.derivation:
        return []
    before, now = record.derivation.settings, found.derivation.settings
    words = list(_code_version(record.derivation, found.derivation.code_version))
    if found.asset == "preference_source":
        words += _data_changes(record, found)
    elif found.asset == "base_model":
        words += _model_changes(before, found)
    elif found.asset == "tokenization_spec":
        words += _tokenization_changes(store, record, found)
    else:
        words += setting_changes(before, now)
    return words


def own_changes(before: Derivation, code_version: str, settings: Mapping[str, Any]) -> list[str]:
    """How an asset's own algorithm and fields of the recipe differ from those of `before`."""
    return [*_code_version(before, code_version), *setting_changes(before.settings, settings)]


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """`field old -> new` for every field, by its dotted name, that is not what it was; a new section is one change."""
    for name, old, new in _differences(before, now):
        yield f"{name} {_shown(old)} -> {_shown(new)}"


def input_changes(instance: dg.DagsterInstance, pipeline: Pipeline, asset: str) -> list[str] | None:
    """Which inputs of `asset`, and whether its code version, are not those of its latest materialization, if any."""
    before, node = latest(instance, pipeline.key(asset)), GRAPH[asset]
    if before is None:
        return None
    words = []
    if before.code_version != (new := node.code_version(pipeline.recipe)):
        words.append(f"code version {before.code_version} -> {new}")
    for name in node.needed_by(pipeline.recipe):
        old, now = before.input_version(pipeline.key(name)), data_version(instance, pipeline.key(name))
        if old != now:
            words.append(f"{name} {short(old)} -> {short(now)}")
    return words


def shown_changes(words: Sequence[str] | None) -> dg.MarkdownMetadataValue:
    """The words as the UI shows them: each in a block of its own, so that a template's text is not taken for markup.

    None stands for an asset that was never materialized before.
    """
    if not words:
        return dg.MetadataValue.md("first materialization" if words is None else "nothing")
    return dg.MetadataValue.md("\n\n".join(f"~~~~text\n{word.replace('~~~~', '~ ~ ~ ~')}\n~~~~" for word in words))


def _code_version(before: Derivation, now: str) -> Iterator[str]:
    if before.code_version != now:
        yield f"code version {before.code_version} -> {now}"


def _data_changes(record: Record, found: Found) -> Iterator[str]:
    old, new = record.derivation.settings["sources"], found.derivation.settings["sources"]
    old_files, new_files = named_files(old), named_files(new)
    known, rows = record.details.get("rows", {}), None
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in new_files:
            yield f"{name} removed"
        elif name not in old_files:
            yield f"{name} added"
        elif old_files[name]["sha256"] != new_files[name]["sha256"]:
            rows = rows or count_source_rows(found)
            yield f"{name} differs{_row_counts(known.get(name), rows[name])}"
    commits = [source["revision"] for source in found.places["hub"]]
    yield from _hub_changes(_by_number(old), _by_number(new), commits)
    if old_files.keys() == new_files.keys() and list(old_files) != list(new_files):
        yield "the order of the files changed"


def _hub_changes(old: Mapping[str, Any], new: Mapping[str, Any], commits: Sequence[str]) -> Iterator[str]:
    """What of the hub's data sets is different: which they are, and of each that stayed its files."""
    whole = [{name: {**hub, "files": None} for name, hub in hubs.items()} for hubs in (old, new)]
    yield from setting_changes(*whole)
    for (name, about), commit in zip(new.items(), commits, strict=True):
        if name not in old or old[name]["hub"] != about["hub"]:
            continue
        was, now = old[name].get("files", {}), about["files"]  # records from before hub files were told apart have none
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


def _model_changes(before: dict[str, Any], found: Found) -> Iterator[str]:
    now = found.derivation.settings
    if found.fingerprint is None:
        yield f"{now['hub']} is at commit {short(now['commit'])}, which is not downloaded yet"
        return
    commit = found.places["commit"]
    at = f" at commit {short(commit)}" if commit else ""
    if before["weights"] != now["weights"]:
        names = sorted(file.name for file in found.places["folder"].glob("*.safetensors"))
        yield f"{names[0]} differs{at}" if len(names) == 1 else f"the weights in {len(names)} files differ{at}"
    for words in setting_changes(before["config"], now["config"]):
        yield f"config {words}"


def _tokenization_changes(store: Store, record: Record, found: Found) -> Iterator[str]:
    before, now = dict(record.derivation.settings), dict(found.derivation.settings)
    old_files, new_files = ({**s.pop("files"), "template": s.pop("chat_template")} for s in (before, now))
    assert found.tokenizer is not None
    if old_files != new_files:
        try:
            artifact = store.open("tokenization_spec", record.fingerprint)
        except StoreError:
            yield "tokenizer or chat template changed; how they were is no longer in the store"
        else:
            differing = {n for n in old_files.keys() | new_files.keys() if old_files.get(n) != new_files.get(n)}
            yield from tokenizer_changes(artifact, found.tokenizer, differing)
    yield from setting_changes(before, now)


class _Absent:
    """What a field is that is not there: equal to no value."""

    def __str__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            path = f"{name}.{key}" if name else str(key)
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _has_sections(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, f"{name}[{index}]")
    elif old != new:
        yield name, old, new


def _has_sections(values: list[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict) or (isinstance(value, list) and _has_sections(value)):
        return shorten(json.dumps(value, ensure_ascii=False).replace('"', ""), _LONGEST_SECTION, placeholder=" ...")
    return shortened(str(value))
