"""Messages for pydantic's errors in a recipe: place, field, expected and found value, and a suggestion.

Suggestions come from the recipe's fields: a similar name of the section, the same name in another section, as `learning_rate`
in the optimizer, or TRL's name for a field.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from assets.inputs.recipe_location import place_of_named
from training.contract.config.fields import shown
from training.contract.config.recipe import Recipe
from training.contract.config.variants import RecipeDocument
from workflows.recipes import trl_names

_LISTED = 20  # names; a longer list would hide the suggestion
_ALIKE = 0.8  # less similar names are different words: gpu and cpu, kto_pair and exo_pair
_NULL_HINT = " (`null` removes a field of the recipe itself)"
_NO_SECTION = {"model_type", "dict_type"}
_OTHER_CODE = "invalid-value"
# The code of an error, by pydantic's type.
_CODES = {
    "extra_forbidden": "unknown-field",
    "missing": "missing-field",
    "enum": "unknown-choice",
    "literal_error": "unknown-choice",
    "model_type": "wrong-type",
    "dict_type": "wrong-type",
    "tuple_type": "wrong-type",
    "string_type": "wrong-type",
    "int_type": "wrong-type",
    "int_parsing": "wrong-type",
    "float_type": "wrong-type",
    "float_parsing": "wrong-type",
}


def faults(error: ValidationError) -> Iterator[str]:
    """Yield each error as `file:line: field: message [code]`. Dagster appends file and line to the field's name.

    If fields of a section contradict each other, the place is the first one named in the message and present in the file.
    pydantic reports a list with a wrong item as too short as well, as it counts only valid items: skip that error.
    """
    located = [(".".join(map(str, fault["loc"])), fault) for fault in error.errors()]
    messages: dict[str, list[str]] = {}
    for location, fault in located:
        field, _, place = location.partition(" at ")
        if fault["type"] == "too_short" and any(other.startswith(f"{field}.") for other, _ in located):
            continue
        name = field.removeprefix("attributes").removeprefix(".")
        message = f"{_message(name, fault)} [{_CODES.get(fault['type'], _OTHER_CODE)}]"
        location_text = f"{place}: {_without_tags(name) or 'the recipe'}"
        if fault["type"] == "value_error" and isinstance(fault["input"], Mapping):
            location_text = place_of_named(Path(place.rpartition(":")[0]), message, _sections(name)) or location_text
        messages.setdefault(location_text, []).append(message)
    for location_text, texts in messages.items():
        yield f"{location_text}: {', or '.join(texts)}"


def _sections(name: str) -> tuple[str, str]:
    """Return the sections whose fields an error in the section `name` may name: that one, and the recipe or the variant."""
    path = name.split(".")
    return name, ".".join(path[:2]) if path[0] == "variants" else ""


def _without_tags(name: str) -> str:
    """Remove pydantic's suffix for one of several types, such as `literal['a']`, or for a key: it is not a field."""
    return re.sub(r"\.((literal|tuple)\[.*\]|\[key\])$", "", name)


def _message(name: str, fault: Any) -> str:
    found = shown(fault["input"])
    match fault["type"]:
        case "extra_forbidden":
            return _unknown_field(name)
        case "missing":
            return "it is missing and has no default"
        case "value_error":
            hint = _NULL_HINT if name.startswith("variants.") and not name.endswith("[key]") else ""
            return str(fault["msg"]).removeprefix("Value error, ") + hint
        case "enum" | "literal_error":
            return _unknown_choice(fault["ctx"]["expected"], fault["input"])
        case "too_short":
            return f"expected at least {fault['ctx']['min_length']} item, found {found}"
        case "tuple_type":
            return f"expected a list, found {found}"
        case error_type if error_type in _NO_SECTION and (fields := _section(name)):
            return f"expected a section with fields ({', '.join(fields)}), found {found}"
        case "dict_type":
            return f"expected a section, found {found}"
    return f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, found {found}"


def _unknown_choice(expected: str, value: Any) -> str:
    known = re.findall("'(.*?)'", expected)
    trl = [name for name in known if name == trl_names.CHOICES.get(str(value))]
    suggestions = trl or difflib.get_close_matches(str(value), known, n=1, cutoff=_ALIKE)
    suggestion = f"; did you mean `{suggestions[0]}`?" if suggestions else ""
    if suggestions and len(known) > _LISTED:
        expected = f"one of {len(known)} names"
    return f"expected {expected}, found {shown(value)}{suggestion}"


def _unknown_field(name: str) -> str:
    """Return the message for an unknown field, with TRL's equivalent, or the same or a similar name in the recipe."""
    section, _, field = name.rpartition(".")
    if field in trl_names.ABSENT:
        return f"there is no such field: {trl_names.ABSENT[field]}"
    known = _section(section)
    elsewhere = [path for path in _paths(Recipe) if path.endswith(f".{field}") and not section.startswith(path)]
    inner = [path for path in elsewhere if path.startswith(f"{section}.")]
    trl = [trl_names.FIELDS[field]] if field in trl_names.FIELDS else []
    suggestions = (
        trl or inner or difflib.get_close_matches(field, known, n=1) or sorted(elsewhere, key=lambda p: p.count("."))
    )
    suggestion = f"did you mean `{suggestions[0]}`?" if suggestions else f"expected one of {', '.join(known)}"
    return f"there is no such field; {suggestion}"


def _section(name: str) -> list[str]:
    """Return the names of the fields of the section `name`; a variant has the recipe's."""
    path = name.split(".") if name else []
    return _fields(Recipe, path[2:]) if path[:1] == ["variants"] and len(path) > 1 else _fields(RecipeDocument, path)


def _fields(kind: Any, path: Sequence[str]) -> list[str]:
    """Return the fields of the section at `path`, even if it has one of several types or is in a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if not path:
            return list(kind.model_fields)
        inner = kind.model_fields.get(path[0])
        return [] if inner is None else _fields(inner.annotation, path[1:])
    rest = path[1:] if path and path[0].isdigit() else path
    return list(dict.fromkeys(field for part in get_args(kind) for field in _fields(part, rest)))


def _paths(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the dotted name of every field of a section and its subsections, except those in lists."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _paths(kind, f"{above}{name}.")
