"""What pydantic finds wrong in a recipe, in words: place, field, what was expected, what was found, and what was meant.

What was meant is guessed from the recipe's own fields: a name that is nearly one of the section, or one that is a field
of another section, as `learning_rate` is of the optimizer, or what TRL calls so.
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

_LISTED = 20  # names: of more, that which was meant would be overlooked behind them
_ALIKE = 0.8  # below it are other words: gpu and cpu, kto_pair and exo_pair
_TAKE_AWAY = " (`null` takes away a field that the recipe itself gives)"
_NO_SECTION = {"model_type", "dict_type"}
# The code of an error by pydantic's name of its kind.
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
    """Each fault as `file:line: field: what is wrong`. Dagster has put file and line behind the field's name.

    Where fields of a section contradict each other, that is the first one which the message names and the file says.
    Of a list with a wrong item pydantic also says that it is too short, since it counts the others alone: that is left out.
    """
    located = [(".".join(map(str, fault["loc"])), fault) for fault in error.errors()]
    told: dict[str, list[str]] = {}
    for location, fault in located:
        field, _, place = location.partition(" at ")
        if fault["type"] == "too_short" and any(other.startswith(f"{field}.") for other, _ in located):
            continue
        name = field.removeprefix("attributes").removeprefix(".")
        words = f"{_words(name, fault)} [{_CODES.get(fault['type'], 'invalid-value')}]"
        where = f"{place}: {_without_tags(name) or 'the recipe'}"
        if fault["type"] == "value_error" and isinstance(fault["input"], Mapping):
            where = place_of_named(Path(place.rpartition(":")[0]), words, _sections(name)) or where
        told.setdefault(where, []).append(words)
    for where, found in told.items():
        yield f"{where}: {', or '.join(found)}"


def _sections(name: str) -> tuple[str, str]:
    """In which sections an error of the section `name` may name fields: in that, and in the whole recipe, or the variant."""
    path = name.split(".")
    return name, ".".join(path[:2]) if path[0] == "variants" else ""


def _without_tags(name: str) -> str:
    """pydantic names the type of a field that may be one of several as if it were a field, `literal['a']`; so it does a key."""
    return re.sub(r"\.((literal|tuple)\[.*\]|\[key\])$", "", name)


def _words(name: str, fault: Any) -> str:
    found = shown(fault["input"])
    match fault["type"]:
        case "extra_forbidden":
            return _unknown(name)
        case "missing":
            return "it is missing, and has no default"
        case "value_error":
            hint = _TAKE_AWAY if name.startswith("variants.") and not name.endswith("[key]") else ""
            return str(fault["msg"]).removeprefix("Value error, ") + hint
        case "enum" | "literal_error":
            return _no_choice(fault["ctx"]["expected"], fault["input"])
        case "too_short":
            return f"expected at least {fault['ctx']['min_length']} item, found {found}"
        case "tuple_type":
            return f"expected a list, found {found}"
        case kind if kind in _NO_SECTION and (fields := _section(name)):
            return f"expected a section with fields ({', '.join(fields)}), found {found}"
        case "dict_type":
            return f"expected a section, found {found}"
    return f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, found {found}"


def _no_choice(expected: str, given: Any) -> str:
    known = re.findall("'(.*?)'", expected)
    trl = [name for name in known if name == trl_names.CHOICES.get(str(given))]
    near = trl or difflib.get_close_matches(str(given), known, n=1, cutoff=_ALIKE)
    meant = f"; did you mean `{near[0]}`?" if near else ""
    if near and len(known) > _LISTED:
        expected = f"one of {len(known)} names"
    return f"expected {expected}, found {shown(given)}{meant}"


def _unknown(name: str) -> str:
    """A field there is not. What TRL calls so was meant; or what has this name in the same section, or nearly, or anywhere."""
    section, _, field = name.rpartition(".")
    if field in trl_names.ABSENT:
        return f"there is no such field: {trl_names.ABSENT[field]}"
    known = _section(section)
    elsewhere = [path for path in _paths(Recipe) if path.endswith(f".{field}") and not section.startswith(path)]
    below = [path for path in elsewhere if path.startswith(f"{section}.")]
    trl = [trl_names.FIELDS[field]] if field in trl_names.FIELDS else []
    near = trl or below or difflib.get_close_matches(field, known, n=1) or sorted(elsewhere, key=lambda p: p.count("."))
    meant = f"did you mean `{near[0]}`?" if near else f"expected one of {', '.join(known)}"
    return f"there is no such field; {meant}"


def _section(name: str) -> list[str]:
    """The names of the fields of the section called `name`; of a variant's those of the recipe."""
    path = name.split(".") if name else []
    return _fields(Recipe, path[2:]) if path[:1] == ["variants"] and len(path) > 1 else _fields(RecipeDocument, path)


def _fields(kind: Any, path: Sequence[str]) -> list[str]:
    """The fields of the section at `path`, which may be one of several types, or in a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if not path:
            return list(kind.model_fields)
        inner = kind.model_fields.get(path[0])
        return [] if inner is None else _fields(inner.annotation, path[1:])
    rest = path[1:] if path and path[0].isdigit() else path
    return list(dict.fromkeys(field for part in get_args(kind) for field in _fields(part, rest)))


def _paths(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every field of a section and of those in it, by its dotted name. What is in a list has none."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _paths(kind, f"{above}{name}.")
