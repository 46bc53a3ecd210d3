"""A recipe's file as YAML: what stops it from being read, told with its line, and what YAML lets pass.

YAML's readers take the last of two equal keys without a word, so that a field somebody sees in the file is not the one that
counts. Here that is an error like any other.
"""

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from training.contract.errors import RecipeError
from workflows.faults import faults

TYPE = "workflows.PreferenceTuning"
RECIPE_FILE = "defs.yaml"
_FIELDS = ("type", "attributes")


def refuse_no_recipe(file: Path) -> None:
    """Raises RecipeError unless exactly one document of the file is a recipe: one of another type, or none, is told so."""
    types = [_type(document) for document in _documents(file)]
    if types.count(TYPE) == 1:
        return
    found = f"holds {types.count(TYPE)} of them" if TYPE in types else f"has {', '.join(types) or 'nothing in it'}"
    raise RecipeError(f"{file}: expected one document with `type: {TYPE}` and the recipe in `attributes:`; it {found}")


def refuse_foreign_parts(file: Path) -> None:
    """Raises RecipeError where there is more in a recipe's file than one document with `type` and `attributes`.

    `pedigree` would not look at it, and Dagster's web server would run it: Jinja in other fields and in documents of other
    types, and modules that they name.
    """
    documents = [document for document in _documents(file) if isinstance(document, yaml.MappingNode)]
    fields = [(key, value) for document in documents for key, value in document.value]
    if TYPE not in [value.value for key, value in fields if key.value == "type"]:
        return
    foreign = [(key, f"`{key.value}`") for key, _ in fields if key.value not in _FIELDS]
    foreign += [(document, "another document") for document in documents[1:]]
    if foreign:
        node, what = foreign[0]
        raise RecipeError(
            f"{file}:{node.start_mark.line + 1}: there is more here than a recipe: {what}; expected one document with `type` "
            "and `attributes` alone: take it away"
        )


def refuse_repeated_keys(file: Path) -> None:
    """Raises RecipeError with the lines of a key that stands twice in one section."""
    for document in _documents(file):
        for first, second in _repeated(document):
            lines = f"{first.start_mark.line + 1} and {second.start_mark.line + 1}"
            raise RecipeError(
                f"{file}: `{first.value}` stands on the lines {lines}; only the last would count: remove one"
            )


def variant_names(file: Path) -> list[str]:
    """The variants that another recipe's file names; none where that cannot be read, which is told when it is loaded."""
    try:
        return [str(name) for name in yaml.safe_load(file.read_text(encoding="utf-8"))["attributes"]["variants"]]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return []


def explained(file: Path, error: BaseException) -> str:
    """The root cause of `error`, which loading `file` raised, as lines that each name their place."""
    while error.__cause__ is not None and not isinstance(error, (ValidationError, RecipeError)):
        error = error.__cause__
    if isinstance(error, ValidationError):
        return "\n".join(faults(error))
    text = str(error).removeprefix("Invariant failed. Description: ") or type(error).__name__
    return text if str(file) in text else f"{file}: {text}"


def _documents(file: Path) -> list[yaml.Node]:
    """Raises RecipeError where the file may not be read, and with the line where it is no UTF-8, or no YAML."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"{file}: it cannot be read: {error.strerror}") from error
    try:
        return [node for node in yaml.compose_all(content.decode(), Loader=yaml.SafeLoader) if node is not None]
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{file}:{line}: byte {content[error.start]:#04x} is no UTF-8: save the file as that"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        tabs = " (YAML is indented with spaces)" if "\\t" in str(error.problem) else ""
        raise RecipeError(f"{place}: this is no YAML: {error.problem or error.context}{tabs}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{file}: this is no YAML: {error}") from None


def _type(document: yaml.Node) -> str:
    entries = document.value if isinstance(document, yaml.MappingNode) else []
    return next((str(value.value) for key, value in entries if key.value == "type"), "no `type`")


def _repeated(node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Every key that is repeated in its mapping, and its repetition."""
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if seen.setdefault(key.value, key) is not key:
                yield seen[key.value], key
        children = [value for _, value in node.value]
    for child in children:
        yield from _repeated(child)
