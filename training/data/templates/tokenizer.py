"""Load tokenizers without running code from their folders, and fingerprint them by their behaviour.

The fingerprint covers:

1. the serialized fast tokenizer: vocabulary, merges, normalizer, pre-tokenizer, added tokens;
2. the ids of the special tokens;
3. ids and offsets of probe texts. They show whether it adds BOS or EOS, and how it treats special tokens in text.

Saving and loading rewrites some parts without effect: a post-processor appears or takes another form, a missing prefix becomes
an empty one. So a post-processor counts by its effect on the probes, and empty fields of the model do not count. Names,
folders, padding, truncation and the padding token do not count, since they change no token of a conversation.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.contract.config.json_object import JsonObject
from training.contract.errors import TemplateError
from training.contract.identity.fingerprint import fingerprint, value_digest

_ORIGINS = ("name_or_path", "tokenizer_file", "vocab_file", "is_local", "local_files_only")
_SPECIAL_ROLES = ("bos_token_id", "eos_token_id", "unk_token_id")
_BY_EFFECT = ("post_processor", "padding", "truncation", "version")
_PROBE_TEXTS = (
    "",
    "Hello, world!",
    "  two spaces\n\nand a line",
    "naïve café 東京 👩‍👩‍👧 \u2028",
    "x = [1, 20, 300]\t# tab",
)
# Texts for the comparison with tokenizer.json. More probe texts would change every fingerprint.
_COMPARED_TEXTS = (
    *_PROBE_TEXTS,
    "It cost $1,650 in 2023 (650841823).\n\n\tDON'T you'll we're",
    "HTTPServer fooBar2baz  ",
)


def load_tokenizer(folder: Path, called: Path | None = None) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer. Raise TemplateError if it cannot be loaded or is slow. Errors name `called` instead of a copy."""
    name = called or folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # many kinds: a missing folder, a missing or corrupt file
        needs_code = "trust_remote_code" in str(error)
        reason = "it needs code from its folder, which Pedigree never runs" if needs_code else error
        raise TemplateError(
            f"the tokenizer {name} cannot be loaded: {reason}; set `tokenization.tokenizer` to a folder with "
            "tokenizer.json and tokenizer_config.json, or to a Hub id",
            "unloadable-tokenizer",
        ) from error
    if not tokenizer.is_fast:
        raise TemplateError(
            f"{name} is a {type(tokenizer).__name__}, not a fast tokenizer; convert it to a tokenizer.json "
            "(transformers.convert_slow_tokenizer) and set `tokenization.tokenizer`",
            "slow-tokenizer",
        )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.name_or_path = str(name)
    return tokenizer


def difference_to_file(tokenizer: PreTrainedTokenizerFast, file: Path) -> str | None:
    """Describe the first text for which `tokenizer` gives other ids than its tokenizer.json; None without such a text.

    transformers may build a tokenizer of another class from the vocabulary in that file, and drop its pre-tokenizer.
    """
    if not file.is_file():
        return None
    original = Tokenizer.from_file(str(file))
    original.no_padding()
    original.no_truncation()
    for text in (*_COMPARED_TEXTS, _control_text(tokenizer)):
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        original_ids: list[int] = original.encode(text, add_special_tokens=False).ids
        if ids != original_ids:
            at = next(n for n in range(len(ids) + 1) if ids[: n + 1] != original_ids[: n + 1])
            return (
                f"transformers loads the tokenizer as {type(tokenizer).__name__}, which gives other tokens than its "
                f"tokenizer.json: in {text!r}, token {at} is {_show_token(tokenizer, ids[at : at + 1])}, but "
                f"{_show_token(tokenizer, original_ids[at : at + 1])} by that file. Training and release use the loaded one"
            )
    return None


def _show_token(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return f"{ids[0]} {tokenizer.convert_ids_to_tokens(ids[0])!r}" if ids else "missing"


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return the special ids that affect conversations: BOS, EOS and unknown."""
    return {role: getattr(tokenizer, role) for role in _SPECIAL_ROLES}


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the ids of all tokens that are markup instead of text, such as the ends of turns."""
    return {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}


def foreign_tokens(tokenizer: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> list[str]:
    """Return the tokens that lack the same id in `other`, ordered by id."""
    known = other.get_vocab()
    return [
        token for token, id_ in sorted(tokenizer.get_vocab().items(), key=lambda t: t[1]) if known.get(token) != id_
    ]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    return fingerprint(
        "tokenizer",
        {
            "serialized": value_digest(_serialized(tokenizer)).hex(),
            "special_ids": special_ids(tokenizer),
            "probes": [_encodings(tokenizer, text) for text in (*_PROBE_TEXTS, _control_text(tokenizer))],
        },
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, without the paths of their source."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in _ORIGINS:
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _serialized(tokenizer: PreTrainedTokenizerFast) -> JsonObject:
    """Return the parts of the serialized tokenizer that the fingerprint covers."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {name: value for name, value in parts["model"].items() if value not in (None, "")}
    return {**{name: part for name, part in parts.items() if name not in _BY_EFFECT}, "model": model}


def _encodings(tokenizer: PreTrainedTokenizerFast, text: str) -> list[Any]:
    """Return ids and offsets, without and with the special tokens that the tokenizer adds."""
    encodings = [
        tokenizer(text, add_special_tokens=added, return_offsets_mapping=True, verbose=False) for added in (False, True)
    ]
    return [[encoding["input_ids"], encoding["offset_mapping"]] for encoding in encodings]


def _control_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a text of all control tokens. It shows whether they are parsed in text."""
    contents = sorted(tokenizer.added_tokens_decoder[id_].content for id_ in control_ids(tokenizer))
    return " a ".join(contents)
