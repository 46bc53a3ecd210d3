"""Locations of recipe fields: prefix errors with the `file:line: field: value` of the field that caused them.

A valid recipe can still name a missing folder, a missing alias or a column without rows. The code that raises the error does
not know about recipes, so the location is added here.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from assets.inputs.model_ref import tokenizer_of
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
            if (line_and_node := _find_field(file, name.split("."))) is not None:
                return f"{file}:{line_and_node[0]}: {name}"
    return None


def _locate(pipeline: Pipeline, field: str) -> str:
    """Return `file:line: field: value`, or `file: field` if the file is unreadable or lacks the field."""
    return _find_location(pipeline, field) or f"{pipeline.file}: {field}"


def _find_location(pipeline: Pipeline, field: str) -> str | None:
    variant_fields = [f"variants.{pipeline.variant}.{field}"] if pipeline.variant is not None else []
    for name in (*variant_fields, field):
        if (line_and_node := _find_field(pipeline.file, name.split("."))) is not None:
            line, node = line_and_node
            value = f": {node.value}" if isinstance(node, yaml.ScalarNode) else ""
            return f"{pipeline.file}:{line}: {name}{value}"
    return None


def tokenizer_places(pipeline: Pipeline) -> RecipePlaces:
    """Return the locations of the fields that determine the tokenizer and the chat template."""
    tokenizer = tokenizer_of(pipeline.recipe).field
    template = tokenizer if pipeline.recipe.tokenization.chat_template is None else "tokenization.chat_template"
    return RecipePlaces(tokenizer=_locate(pipeline, tokenizer), chat_template=_locate(pipeline, template))


def _find_field(file: Path, path: Sequence[str]) -> tuple[int, yaml.Node] | None:
    """Return the line of a field and its value; None if the file cannot be read or lacks it."""
    try:
        document = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return _descend(document, ("attributes", *path))


def _descend(node: yaml.Node | None, path: Sequence[str]) -> tuple[int, yaml.Node] | None:
    """Return line and node at `path` below `node`: the first line of a list's item, or the line of a field's name."""
    start = node
    for name in path:
        if isinstance(node, yaml.MappingNode):
            start, node = next(((key, value) for key, value in _list_fields(node) if key.value == name), (None, None))
        elif isinstance(node, yaml.SequenceNode) and name.isdigit():
            start = node = next(iter(node.value[int(name) :]), None)
        else:
            return None
    return None if start is None or node is None else (start.start_mark.line + 1, node)


def _list_fields(section: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield a section's own fields, then the fields of merged sections (`<<`)."""
    yield from section.value
    for key, merged in section.value:
        if key.value == "<<":
            sections = merged.value if isinstance(merged, yaml.SequenceNode) else [merged]
            for merged_section in sections:
                if isinstance(merged_section, yaml.MappingNode):
                    yield from _list_fields(merged_section)
