"""Where a recipe's file says what an error is about, so that whoever reads the error can go to that line.

A valid recipe can still name a folder that is not there, an alias nobody set, a column that no row has. The code that finds
this does not know of recipes; here its message gets file, line, field and value, as the person wrote them.
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

_OF_A_PATH = (errno.EACCES, errno.ENAMETOOLONG)  # what the operating system has against a path that a field gives
_FIELD = re.compile(r"`([a-z_]+(?:\.\w+)*)(?::[^`]*)?`")  # alone, or with a value behind it


@contextmanager
def written(pipeline: Pipeline, field: str) -> Iterator[None]:
    """Begins each error within by the place of `field`, unless that is not to blame: a server is away, or a disk is full."""
    try:
        yield
    except RegistryUnavailable:
        raise
    except PedigreeError as error:
        raise type(error)(f"{_place(pipeline, field)}: {error}") from error
    except OSError as error:
        if error.errno not in _OF_A_PATH:
            raise
        raise UsageError(f"{_place(pipeline, field)}: {error.filename} cannot be read: {error.strerror}") from error


@contextmanager
def written_where_named(pipeline: Pipeline) -> Iterator[None]:
    """Begins each error within that begins with a field, in backticks, by the place where the file says that.

    Fields that are named further behind may be what to do about it, and not to blame.
    """
    try:
        yield
    except PedigreeError as error:
        begun = _FIELD.match(str(error))
        place = None if begun is None else _found(pipeline, begun[1])
        if place is None:
            raise
        raise type(error)(f"{place}: {error}") from error


def place_of_named(file: Path, message: str, sections: Sequence[str]) -> str | None:
    """`file:line: field` of the first field that `message` names and one of `sections` has; None without one."""
    for named in _FIELD.findall(message):
        for section in sections:
            name = f"{section}.{named}".removeprefix(".")
            if (found := _find(file, name.split("."))) is not None:
                return f"{file}:{found[0]}: {name}"
    return None


def _place(pipeline: Pipeline, field: str) -> str:
    """`file:line: field: value`. The line is left out where the file cannot be read any more, or does not say the field."""
    return _found(pipeline, field) or f"{pipeline.file}: {field}"


def _found(pipeline: Pipeline, field: str) -> str | None:
    own = [f"variants.{pipeline.variant}.{field}"] if pipeline.variant is not None else []
    for name in (*own, field):
        if (found := _find(pipeline.file, name.split("."))) is not None:
            line, node = found
            value = f": {node.value}" if isinstance(node, yaml.ScalarNode) else ""
            return f"{pipeline.file}:{line}: {name}{value}"
    return None


def tokenizer_places(pipeline: Pipeline) -> dict[str, str]:
    """The places of the fields that chose the tokenizer and the chat template, which another field may have brought along."""
    tokenizer = tokenizer_of(pipeline.recipe).field
    template = tokenizer if pipeline.recipe.tokenization.chat_template is None else "tokenization.chat_template"
    return {"tokenizer": _place(pipeline, tokenizer), "chat_template": _place(pipeline, template)}


def _find(file: Path, path: Sequence[str]) -> tuple[int, yaml.Node] | None:
    """The line of a field, and what it holds."""
    try:
        document = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return _below(document, ("attributes", *path))


def _below(node: yaml.Node | None, path: Sequence[str]) -> tuple[int, yaml.Node] | None:
    """In a list, an item's line is that where it begins; in a section, that of the field's name."""
    begins = node
    for name in path:
        if isinstance(node, yaml.MappingNode):
            begins, node = next(((key, value) for key, value in _fields(node) if key.value == name), (None, None))
        elif isinstance(node, yaml.SequenceNode) and name.isdigit():
            begins = node = next(iter(node.value[int(name) :]), None)
        else:
            return None
    return None if begins is None or node is None else (begins.start_mark.line + 1, node)


def _fields(section: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Those that a section has itself come before those of the sections that it merges (`<<`)."""
    yield from section.value
    for key, merged in section.value:
        if key.value == "<<":
            sections = merged.value if isinstance(merged, yaml.SequenceNode) else [merged]
            for each in sections:
                if isinstance(each, yaml.MappingNode):
                    yield from _fields(each)
