"""The files of a tokenizer, and the fields of a config.json with an effect on it.

transformers 5 picks a tokenizer's class from `tokenizer_config.json` and from the model's config.json. So the same tokenizer
files may give other ids in another folder. `class_fields` returns the config.json fields for this choice.

A tokenizer is never loaded from the folder in a recipe. `copy_tokenizer` copies its files and compares the copies with the
recorded sha256; the copy is loaded. So unrecorded files and later changes do not matter.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.contract.config.json_object import JsonObject
from training.contract.errors import DataError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.fingerprint import short
from training.contract.identity.json_objects import read_object

# The forms of a published vocabulary; transformers builds a fast tokenizer from each. Without a vocabulary it would build one
# with only the unknown token.
VOCABULARIES = (
    {"tokenizer.json"},
    {"vocab.json", "merges.txt"},
    {"tokenizer.model"},
    {"tiktoken.model"},
    {"tekken.json"},
    {"spiece.model"},
    {"sentencepiece.bpe.model"},
    {"sentencepiece.model"},
    {"spm.model"},
    {"vocab.txt"},
)
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
# Names and glob patterns. A tokenizer_config.json may name a `tokenizer.*.json` for a range of versions of transformers.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    *CHAT_TEMPLATES,
    "tokenizer.*.json",
    *sorted(set().union(*VOCABULARIES)),
)
CONFIG = "config.json"
CLASS_FIELDS = ("model_type", "model_name", "tokenizer_class", "transformers_version")


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the tokenizer's files in `folder`, by relative name."""
    paths = (path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def holds_tokenizer(folder: Path) -> bool:
    return any(files <= tokenizer_files(folder).keys() for files in VOCABULARIES)


def class_fields(folder: Path) -> JsonObject:
    """Return the fields by which transformers picks a tokenizer's class from the config.json in `folder`, if it exists.

    Raises ModelError if the file does not hold a JSON object.
    """
    path = folder / CONFIG
    config = read_object(path, "a model's config") if path.exists() else {}
    return {name: config[name] for name in CLASS_FIELDS if config.get(name) is not None}


def copy_tokenizer(folder: Path, target: Path, hashes: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Copy the tokenizer in `folder` into `target`, and write a config.json with only the fields `config`.

    `hashes` holds the sha256 of each file by name. Raises DataError if the files or the config's fields differ.
    """
    files = tokenizer_files(folder)
    if differing := sorted(files.keys() ^ hashes.keys()):
        raise DataError(
            f"{folder} changed while it was read: {', '.join(differing)} came or went; run again", "file-changed"
        )
    for name, path in files.items():
        copy_file(path, target / name, hashes[name])
    if (current := class_fields(folder)) != config:
        raise DataError(
            f"{folder / CONFIG} changed while it was read: {dict(config)} became {current}; run again", "file-changed"
        )
    write_class_fields(target, config)


def write_class_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a config.json with the fields `config` into `folder`; write nothing if `config` is empty."""
    if config:
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def copy_file(source: Path, target: Path, sha256: str) -> None:
    """Copy one file. Raises DataError unless the copy has this `sha256`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise DataError(
            f"{source} changed while it was read: {error.strerror or error}; run again", "file-changed"
        ) from error
    if (copied := hash_file(target)) != sha256:
        raise DataError(
            f"{source} changed while it was read: it was {short(sha256)} and is {short(copied)}; "
            "run again once it is written",
            "file-changed",
        )
