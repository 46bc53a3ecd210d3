"""The files that decide how text becomes tokens, and what of a config.json beside them does.

transformers 5 picks a tokenizer's class from `tokenizer_config.json` and from the config.json of the model beside it. So the
same tokenizer files may give other ids in another folder. `class_fields` are the fields of config.json that the choice reads.

A tokenizer is never loaded from the folder that a recipe names. Its files are copied, the copies are compared with the sha256
that the recipe's state was recorded with, and the copy is loaded: `copy_tokenizer`. So a file that is in no key cannot have a
say, and a file that changes meanwhile cannot either.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.contract.errors import DataError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.fingerprint import short
from training.contract.identity.json_objects import read_object

# In each of these forms a tokenizer's vocabulary is published; transformers makes a fast tokenizer of any of them, and of
# none one to which every text is unknown.
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
    """Return the files in `folder` that decide how text becomes tokens, by their names in it."""
    found = (path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def holds_tokenizer(folder: Path) -> bool:
    return any(files <= tokenizer_files(folder).keys() for files in VOCABULARIES)


def class_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of the config.json in `folder` by which transformers picks a tokenizer's class; none without one.

    Raises ModelError if the file cannot be read as an object.
    """
    path = folder / CONFIG
    config = read_object(path, "a model's config") if path.exists() else {}
    return {name: config[name] for name in CLASS_FIELDS if config.get(name) is not None}


def copy_tokenizer(folder: Path, target: Path, hashes: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Copy the tokenizer in `folder` into `target`, with a config.json that has the fields `config` alone.

    Raises DataError unless the files are exactly those of `hashes`, their sha256 by name, and the config's fields are `config`.
    """
    found = tokenizer_files(folder)
    if differing := sorted(found.keys() ^ hashes.keys()):
        raise DataError(f"{folder} changed while it was read: {', '.join(differing)} came or went; run again")
    for name, path in found.items():
        copy_file(path, target / name, hashes[name])
    if (now := class_fields(folder)) != config:
        raise DataError(f"{folder / CONFIG} changed while it was read: {dict(config)} became {now}; run again")
    write_class_fields(target, config)


def write_class_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a config.json with the fields `config` into `folder`; none if there are no fields."""
    if config:
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def copy_file(source: Path, target: Path, sha256: str) -> None:
    """Copy one file. Raises DataError unless the copy has this `sha256`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise DataError(f"{source} changed while it was read: {error.strerror or error}; run again") from error
    if (now := hash_file(target)) != sha256:
        was = f"it was {short(sha256)} and is {short(now)}"
        raise DataError(f"{source} changed while it was read: {was}; run again once it is written")
