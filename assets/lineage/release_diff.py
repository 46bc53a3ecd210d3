"""Changes of the files released beside the weights, since they were frozen, as text. Examples:

tokenizer_config.json pad_token <|end|> -> <|pad|>; generation_config.json temperature 1.0 -> 0.7
preprocessor_config.json differs; eos_tokens [] -> [<|end|>]
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assets.inputs.current import ResolvedRelease
from assets.lineage.settings_diff import setting_changes
from assets.lineage.tokenizer_diff import json_object
from training.contract.errors import StoreError
from training.contract.identity.fingerprint import short
from training.contract.store.artifact import DerivationRecord
from training.contract.store.store import Store

_TOKENIZER_CONFIG = "tokenizer_config.json"
# Compared elsewhere, or written by transformers alone.
_NOT_COMPARED = {"chat_template", "added_tokens_decoder", "transformers_version", "tokenizer_class"}
_NESTED = ("files", "config", "base_generation", "processors", "base_config")


def release_changes(store: Store, record: DerivationRecord, found: ResolvedRelease) -> Iterator[str]:
    """Yield how `found` differs from the release spec of `record`."""
    before, now = dict(record.derivation.settings), dict(found.derivation.settings)
    if found.shipping is None:
        yield f"{now['hub']} is at commit {short(now['commit'])}, which is not downloaded yet"
        return
    old, new = ({name: settings.pop(name, {}) for name in _NESTED} for settings in (before, now))
    for name in _differing_files(old["files"], new["files"]):
        changes = list(_config_changes(store, record, found.tokenizer.folder)) if name == _TOKENIZER_CONFIG else []
        yield from changes or [f"{name} differs"]
    yield from (
        f"generation_config.json {change}" for change in setting_changes(old["base_generation"], new["base_generation"])
    )
    yield from (f"{name} differs" for name in _differing_files(old["processors"], new["processors"]))
    for name, owner in (("config", "the tokenizer"), ("base_config", "the base model")):
        yield from (f"config.json of {owner}: {change}" for change in setting_changes(old[name], new[name]))
    if before.pop("chat_template", None) != now.pop("chat_template", None):
        yield "the file of the chat template differs"
    before.pop("eos_token_ids", None), now.pop("eos_token_ids", None)  # reported with the generation settings
    yield from setting_changes(before, now)


def _differing_files(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _config_changes(store: Store, record: DerivationRecord, folder: Path) -> Iterator[str]:
    """Yield how the tokenizer's config differs from the saved one; nothing if they cannot be compared."""
    try:
        frozen = store.open(record.derivation.kind, record.fingerprint, hashes=False)
    except StoreError:
        return
    old, new = json_object(frozen.folder / "tokenizer" / _TOKENIZER_CONFIG), json_object(folder / _TOKENIZER_CONFIG)
    shared = (old.keys() & new.keys()) - _NOT_COMPARED
    parts = ({name: _token_text(config[name]) for name in shared} for config in (old, new))
    yield from (f"{_TOKENIZER_CONFIG} {change}" for change in setting_changes(*parts))


def _token_text(value: Any) -> Any:
    """Return a token's text, which may be inside an object with matching rules; other values as they are."""
    return value["content"] if isinstance(value, dict) and "content" in value else value
