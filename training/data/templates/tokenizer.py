"""Tokenizers: loaded without running anything of theirs, and identified by what they do.

The identity is made of three things: the serialized fast tokenizer (vocabulary, merges, normalizer, pre-tokenizer, added
tokens), the ids of the special tokens, and the ids and offsets it gives for probe texts, which show whether it adds a BOS
or an EOS and how it treats special tokens in a text.

Saving and loading rewrite some of this without effect: a post-processor appears or takes another form, an absent prefix
becomes an empty one. So a post-processor counts by what it adds to the probes and how it changes their offsets, and empty
fields of the model do not count. Names, folders, padding, truncation and the padding token do not count either: they
change no token of a conversation.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
# These and more are compared with a tokenizer.json. Those above are part of every fingerprint, and cannot be more.
_COMPARED_TEXTS = (
    *_PROBE_TEXTS,
    "It cost $1,650 in 2023 (650841823).\n\n\tDON'T you'll we're",
    "HTTPServer fooBar2baz  ",
)


def load_tokenizer(folder: Path, called: Path | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder. Raises TemplateError if it cannot be loaded or is not a fast one.

    `called` is the folder that errors name, if `folder` is a copy of it.
    """
    name = called or folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # many kinds of errors: no such folder, a file that is broken or missing
        own_code = "trust_remote_code" in str(error)
        why = "it needs code of its own, which is never run" if own_code else error
        raise TemplateError(
            f"the tokenizer {name} cannot be loaded: {why}; set `tokenization.tokenizer` to a folder with "
            "tokenizer.json and tokenizer_config.json, or to a hub id"
        ) from error
    if not tokenizer.is_fast:
        raise TemplateError(
            f"{name} is a {type(tokenizer).__name__}, not a fast tokenizer; convert it to a tokenizer.json "
            "(transformers.convert_slow_tokenizer) and set `tokenization.tokenizer`"
        )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.name_or_path = str(name)
    return tokenizer


def difference_to_file(tokenizer: PreTrainedTokenizerFast, file: Path) -> str | None:
    """Return the first text to which `tokenizer` gives other ids than its own tokenizer.json, in words; None if there is none.

    transformers may build a tokenizer of another class from the vocabulary in that file, and drop its pre-tokenizer.
    """
    if not file.is_file():
        return None
    own = Tokenizer.from_file(str(file))
    own.no_padding()
    own.no_truncation()
    for text in (*_COMPARED_TEXTS, _control_text(tokenizer)):
        loaded, written = (
            tokenizer(text, add_special_tokens=False)["input_ids"],
            own.encode(text, add_special_tokens=False),
        )
        if loaded != written.ids:
            at = next(n for n in range(len(loaded) + 1) if loaded[: n + 1] != written.ids[: n + 1])
            return (
                f"transformers loads the tokenizer as {type(tokenizer).__name__}, which gives other tokens than its "
                f"tokenizer.json: of {text!r}, token {at} is {_spelled(tokenizer, loaded[at : at + 1])}, and "
                f"{_spelled(tokenizer, written.ids[at : at + 1])} by that file. Training and the released model use the former"
            )
    return None


def _spelled(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return f"{ids[0]} {tokenizer.convert_ids_to_tokens(ids[0])!r}" if ids else "missing"


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """The ids that have a part in a conversation: BOS, EOS and unknown."""
    return {role: getattr(tokenizer, role) for role in _SPECIAL_ROLES}


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Every token that is markup rather than text, such as the ends of turns."""
    return {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}


def foreign_tokens(tokenizer: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> list[str]:
    """The tokens of `tokenizer` that `other` does not know by the same number, in the order of their numbers."""
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
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, without the names of where they came from."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in _ORIGINS:
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _serialized(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The parts of the tokenizer that count as they are written."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = {name: value for name, value in parts["model"].items() if value not in (None, "")}
    return {**{name: part for name, part in parts.items() if name not in _BY_EFFECT}, "model": model}


def _encodings(tokenizer: PreTrainedTokenizerFast, text: str) -> list[Any]:
    """Ids and offsets, without and with the special tokens that the tokenizer adds."""
    encoded = [
        tokenizer(text, add_special_tokens=added, return_offsets_mapping=True, verbose=False) for added in (False, True)
    ]
    return [[each["input_ids"], each["offset_mapping"]] for each in encoded]


def _control_text(tokenizer: PreTrainedTokenizerFast) -> str:
    """A text with the spelling of every control token, which shows whether it becomes the token."""
    spelled = sorted(tokenizer.added_tokens_decoder[id_].content for id_ in control_ids(tokenizer))
    return " a ".join(spelled)
