"""What is wrong in a recipe's file, told with its line: what Dagster and pydantic find, and what YAML lets pass.

YAML's readers take the last of two equal keys without a word, so that a field somebody sees in the file is not the one that
counts. Here that is an error like any other.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from training.contract.errors import RecipeError
from training.contract.recipe import Recipe
from training.contract.variants import RecipeFile

_LONGEST_VALUE = 80
_TAKE_AWAY = " (`null` takes away a field that the recipe itself gives)"


def refuse_repeated_keys(file: Path) -> None:
    """Raises RecipeError with the lines of a key that stands twice in one section."""
    for document in yaml.compose_all(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
        for first, second in _repeated(document):
            lines = f"{first.start_mark.line + 1} and {second.start_mark.line + 1}"
            raise RecipeError(
                f"{file}: `{first.value}` stands on the lines {lines}; only the last would count: remove one"
            )


def variant_names(file: Path) -> list[str]:
    """The variants that another recipe's file names; none where that cannot be read, which is told when it is loaded."""
    try:
        documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        return [str(name) for document in documents for name in document["attributes"]["variants"]]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return []


def explained(file: Path, error: BaseException) -> str:
    """The root cause of `error`, which loading `file` raised, as lines that each name their place."""
    while error.__cause__ is not None and not isinstance(error, (ValidationError, RecipeError)):
        error = error.__cause__
    if isinstance(error, ValidationError):
        return "\n".join(_faults(error))
    text = str(error).removeprefix("Invariant failed. Description: ") or type(error).__name__
    return text if str(file) in text else f"{file}: {text}"


def _repeated(node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Every key that is repeated in its mapping, and its repetition."""
    children = [node.value] if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if seen.setdefault(key.value, key) is not key:
                yield seen[key.value], key
        children = [[value for _, value in node.value]]
    for child in (child for group in children for child in group):
        yield from _repeated(child)


def _faults(error: ValidationError) -> Iterator[str]:
    """Each fault as `file:line: field: what is wrong`. Dagster has put file and line behind the field's name.

    Of a list, pydantic counts the items that are sound, and says that they are too few; the others are the fault.
    """
    found = [(*".".join(map(str, fault["loc"])).partition(" at ")[::2], fault) for fault in error.errors()]
    for field, place, fault in found:
        if fault["type"] == "too_short" and any(other.startswith(f"{field}.") for other, _, _ in found):
            continue
        name = field.removeprefix("attributes").removeprefix(".")
        yield f"{place}: {name or 'the recipe'}: {_words(name, fault)}"


def _words(name: str, fault: Any) -> str:
    match fault["type"]:
        case "extra_forbidden":
            return _unknown(name)
        case "missing":
            return "it is missing, and has no default"
        case "value_error":
            hint = _TAKE_AWAY if name.startswith("variants.") else ""
            return str(fault["msg"]).removeprefix("Value error, ") + hint
    return f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, found {_shown(fault['input'])}"


def _unknown(name: str) -> str:
    *section, field = name.split(".")
    known = _fields(Recipe, section[2:]) if section[:1] == ["variants"] else _fields(RecipeFile, section)
    near = difflib.get_close_matches(field, known, n=1)
    return f"there is no such field; did you mean `{near[0]}`?" if near else f"expected one of {', '.join(known)}"


def _fields(kind: Any, path: Sequence[str]) -> list[str]:
    """The fields of the section at `path`, which may be one of several types, or in a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if not path:
            return list(kind.model_fields)
        inner = kind.model_fields.get(path[0])
        return [] if inner is None else _fields(inner.annotation, path[1:])
    rest = path[1:] if path and path[0].isdigit() else path
    return list(dict.fromkeys(field for part in get_args(kind) for field in _fields(part, rest)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."
