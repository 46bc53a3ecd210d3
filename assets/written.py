"""Where a recipe's file says what an error is about, so that whoever reads the error can go to that line.

A valid recipe can still name a folder that is not there, an alias nobody set, a file with an error in it. The code that finds
this does not know of recipes; here its message gets file, line, field and value, as the person wrote them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from assets.named_model import tokenizer_of
from assets.pipeline import Pipeline
from training.contract.errors import PedigreeError, RegistryAway


@contextmanager
def written(pipeline: Pipeline, field: str) -> Iterator[None]:
    """Begins each error within by the place of `field`, unless a server is away, which no field is to blame for."""
    try:
        yield
    except RegistryAway:
        raise
    except PedigreeError as error:
        raise type(error)(f"{_place(pipeline, field)}: {error}") from error


def _place(pipeline: Pipeline, field: str) -> str:
    """`file:line: field: value`. The line is left out where the file cannot be read any more, or does not say the field."""
    own = [f"variants.{pipeline.variant}.{field}"] if pipeline.variant is not None else []
    for name in (*own, field):
        if (node := _node(pipeline.file, name.split("."))) is not None:
            value = f": {node.value}" if isinstance(node, yaml.ScalarNode) else ""
            return f"{pipeline.file}:{node.start_mark.line + 1}: {name}{value}"
    return f"{pipeline.file}: {field}"


def tokenizer_places(pipeline: Pipeline) -> dict[str, str]:
    """The places of the fields that chose the tokenizer and the chat template, which another field may have brought along."""
    tokenizer = tokenizer_of(pipeline.recipe).field
    template = tokenizer if pipeline.recipe.tokenization.chat_template is None else "tokenization.chat_template"
    return {"tokenizer": _place(pipeline, tokenizer), "chat_template": _place(pipeline, template)}


def _node(file: Path, path: Sequence[str]) -> yaml.Node | None:
    try:
        document = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return _below(document, ("attributes", *path))


def _below(node: yaml.Node | None, path: Sequence[str]) -> yaml.Node | None:
    for name in path:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == name), None)
        elif isinstance(node, yaml.SequenceNode) and name.isdigit():
            node = next(iter(node.value[int(name) :]), None)
        else:
            return None
    return node
