"""Changes of a tokenizer and its chat template since they were frozen, as text.

The frozen tokenizer was saved by transformers, which writes some parts in another form than the original file. So only common
parts are compared: token ids, merges and special tokens. If these are equal but a file's bytes differ, the file is named.
"""

import difflib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assets.inputs.resolve import LocatedTokenizer
from training.contract.config.json_object import JsonObject
from training.contract.errors import PedigreeError
from training.contract.identity.chat_template import chat_template
from training.contract.protocol.spec_files import SPEC_FILE
from training.contract.store.artifact import Artifact

_SHOWN_TOKENS = 3
_SHOWN_LINES = 4
_ROLES = ("bos_token", "eos_token", "unk_token")
_TEMPLATE_FILES = {"template", "chat_template.jinja", "chat_template.json", "tokenizer_config.json"}


def tokenizer_changes(before: Artifact, now: LocatedTokenizer, differing: set[str]) -> Iterator[str]:
    """Yield how `now` differs from the frozen tokenization spec `before`. `differing`: the files with different bytes."""
    try:
        of_recipe = None if now.chat_template is None else now.chat_template.read_bytes()
        template = list(_template_changes(before.json(SPEC_FILE)["template"], chat_template(now.folder, of_recipe)))
        tokens = list(_token_changes(_Tokens.read(before.folder / "tokenizer"), _Tokens.read(now.folder)))
    except (AttributeError, KeyError, OSError, PedigreeError, TypeError, ValueError):
        template, tokens = [], []  # a file of an unknown form: the job finds out if it loads
    yield from template
    yield from tokens
    if tokens:
        return
    for name in sorted(differing - _TEMPLATE_FILES if template else differing):
        yield "chat template file differs, its text does not" if name == "template" else f"{name} differs"


@dataclass(frozen=True)
class _Tokens:
    ids: Mapping[str, int]
    merges: list[Any]
    special: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "_Tokens":
        serialized, config = json_object(folder / "tokenizer.json"), json_object(folder / "tokenizer_config.json")
        model = serialized.get("model", {})
        vocabulary = model.get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in the order of their ids
            vocabulary = {piece: id_ for id_, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in serialized.get("added_tokens", [])}
        declared = {token["content"]: int(id_) for id_, token in config.get("added_tokens_decoder", {}).items()}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])]
        special = {**json_object(folder / "special_tokens_map.json"), **config}
        return cls(
            {**vocabulary, **declared, **added}, merges, {r: t for r in _ROLES if (t := _content(special.get(r)))}
        )


def _template_changes(before: str | None, now: str | None) -> Iterator[str]:
    """Yield the first differing line of the texts, with a few changed lines of both."""
    if before == now:
        return
    old, new = (before or "").splitlines(), (now or "").splitlines()
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    body = itertools.islice(difflib.unified_diff(old, new, n=0, lineterm=""), 2, None)  # two lines name the files
    lines = [line for line in body if not line.startswith("@@")]
    more = [f"... {len(lines) - _SHOWN_LINES} lines more"] if len(lines) > _SHOWN_LINES else []
    shown = [f"    {line}" for line in (*lines[:_SHOWN_LINES], *more)]
    yield "\n".join([f"chat template changed: line {same + 1}", *shown])


def _token_changes(before: _Tokens, now: _Tokens) -> Iterator[str]:
    yield from _list_tokens("gained token", sorted(now.ids.keys() - before.ids.keys()))
    yield from _list_tokens("lost token", sorted(before.ids.keys() - now.ids.keys()))
    moved = sorted(text for text in before.ids.keys() & now.ids.keys() if before.ids[text] != now.ids[text])
    yield from _list_tokens("moved token", [f"{text} (id {before.ids[text]} -> {now.ids[text]})" for text in moved])
    if before.merges != now.merges:
        yield f"tokenizer merges changed ({len(before.merges):,} -> {len(now.merges):,})"
    for role in _ROLES:
        old, new = before.special.get(role), now.special.get(role)
        if old is not None and new is not None and (old, before.ids.get(old)) != (new, now.ids.get(new)):
            yield f"tokenizer {role} {old} (id {before.ids.get(old)}) -> {new} (id {now.ids.get(new)})"


def _list_tokens(change: str, texts: list[str]) -> Iterator[str]:
    if len(texts) <= _SHOWN_TOKENS:
        yield from (f"tokenizer {change} {text}" for text in texts)
    else:
        yield f"tokenizer {change}s: {len(texts):,}, first {', '.join(texts[:_SHOWN_TOKENS])}"


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def json_object(path: Path) -> JsonObject:
    """Return the object in a JSON file; empty if it cannot be read or is not an object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
