"""Locations of recipe fields: prefix errors with the `file:line: field: value` of the field that caused them.

A valid recipe can still name a missing folder, a missing alias or a column without rows. The code that raises the error does
not know about recipes, so the location is added here.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from assets.inputs.model_ref import tokenizer_of
from assets.inputs.recipe_yaml import find_field
from assets.pipeline.pipeline import Pipeline
from training.contract.errors import PedigreeError, RegistryUnavailable, UsageError
from training.contract.protocol.locations import RecipePlaces

_PATH_ERRORS = (errno.EACCES, errno.ENAMETOOLONG)  # errors of the operating system caused by a path in a field
_FIELD = re.compile(r"`([a-z_]+(?:\.\w+)*)(?::[^`]*)?`")  # alone, or followed by a value


@contextmanager
def written(pipeline: Pipeline, field: str) -> Iterator[None]:
    """Prefix errors of the block with the location of `field`, unless a server is unavailable or a disk is full."""
    try:
        yield
    except RegistryUnavailable:
        raise
    except PedigreeError as error:
        raise type(error)(f"{_locate(pipeline, field)}: {error}") from error
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        raise UsageError(
            f"{_locate(pipeline, field)}: {error.filename} cannot be read: {error.strerror}", "unreadable-path"
        ) from error


@contextmanager
def add_recipe_location(pipeline: Pipeline) -> Iterator[None]:
    """If an error of the block begins with a field in backticks, prefix it with the location of the field.

    Fields later in the message may be part of the advice, not the cause.
    """
    try:
        yield
    except PedigreeError as error:
        field = _FIELD.match(str(error))
        location = None if field is None else _find_location(pipeline, field[1])
        if location is None:
            raise
        raise type(error)(f"{location}: {error}") from error


def place_of_named(file: Path, message: str, sections: Sequence[str]) -> str | None:
    """Return `file:line: field` of the first field in `message` that exists in one of `sections`; else None."""
    for field in _FIELD.findall(message):
        for section in sections:
            name = f"{section}.{field}".removeprefix(".")
            if (found := find_field(file, name.split("."))) is not None:
                return f"{file}:{found.line}: {name}"
    return None


def _locate(pipeline: Pipeline, field: str) -> str:
    """Return `file:line: field: value`, or `file: field` if the file is unreadable or lacks the field."""
    return _find_location(pipeline, field) or f"{pipeline.file}: {field}"


def _find_location(pipeline: Pipeline, field: str) -> str | None:
    variant_fields = [f"variants.{pipeline.variant}.{field}"] if pipeline.variant is not None else []
    for name in (*variant_fields, field):
        if (found := find_field(pipeline.file, name.split("."))) is not None:
            value = "" if found.text is None else f": {found.text}"
            return f"{pipeline.file}:{found.line}: {name}{value}"
    return None


def tokenizer_places(pipeline: Pipeline) -> RecipePlaces:
    """Return the locations of the fields that determine the tokenizer and the chat template."""
    tokenizer = tokenizer_of(pipeline.recipe).field
    template = tokenizer if pipeline.recipe.tokenization.chat_template is None else "tokenization.chat_template"
    return RecipePlaces(tokenizer=_locate(pipeline, tokenizer), chat_template=_locate(pipeline, template))
