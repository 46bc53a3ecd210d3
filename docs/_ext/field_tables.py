"""Tables of the fields of pydantic models, as Markdown: field, type, default, description."""

import types
from collections.abc import Iterator, Sequence
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from training.contract.config.variants import RecipeDocument
from training.launch.cluster.engine_file import LocalSettings, RayProfile, RaySettings, SlurmProfile, SlurmSettings

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "text", date: "date"}
_LARGE = 2**31 - 1  # a limit from here on only guards against typing errors
ENGINE: dict[str, type[BaseModel]] = {
    "local": LocalSettings,
    "slurm": SlurmSettings,
    "slurm profiles": SlurmProfile,
    "ray": RaySettings,
    "ray profiles": RayProfile,
}


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the models that a field may hold, also in a list or a union."""
    return list(_models(field.annotation))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def section_at(path: str) -> list[type[BaseModel]]:
    """Return the models at a path such as `training.optimizer`, from the first model of a union on the way."""
    found: list[type[BaseModel]] = [RecipeDocument]
    for name in path.split("."):
        found = sections_of(found[0].model_fields[name])
    return found


def recipe_table(path: str) -> str:
    """Return the table of a section of the recipe; one for each type if it is a union."""
    found = section_at(path)
    if len(found) == 1:
        return fields_table(found[0])
    return "\n\n".join(f"{section.model_fields['type'].description}\n\n{fields_table(section)}" for section in found)


def engine_table(name: str) -> str:
    """Return the table of one engine of engine.yaml, or of its profiles."""
    return fields_table(ENGINE[name])


def fields_table(section: type[BaseModel]) -> str:
    rows = [
        (f"`{name}`", type_text(field), default_text(field), field.description or "")
        for name, field in section.model_fields.items()
    ]
    return markdown_table(("field", "type", "default", "description"), rows)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def type_text(field: FieldInfo) -> str:
    """Return the type of a field with its limits, such as `integer, at least 1`."""
    return ", ".join([_type(field.annotation), *_limits(field.metadata)])


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([_type(parts[0]), *_limits(parts[1:])])
    if origin in (Union, types.UnionType):
        return _union([part for part in parts if part is not type(None)])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts) if len(parts) < 3 else ", ".join(f"`{p}`" for p in parts)
    if origin is tuple:
        return f"list of {_plural(_type(parts[0]))}" if Ellipsis in parts else f"list of {len(parts)} numbers"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "name of a type"
    return _NAMES[annotation]


def _union(parts: Sequence[Any]) -> str:
    return " or ".join(dict.fromkeys(map(_type, parts)))


def _plural(name: str) -> str:
    return name if name == "text" else f"{name}s"


def _limits(metadata: Sequence[Any]) -> Iterator[str]:
    """Yield the limits among annotations; a pydantic `Field` in an annotation holds them in its own metadata."""
    for part in metadata:
        match part:
            case FieldInfo():
                yield from _limits(part.metadata)
            case Gt():
                yield f"above {part.gt}"
            case Lt() if _is_shown(part.lt):
                yield f"below {part.lt}"
            case Ge() if _is_shown(part.ge):
                yield f"at least {part.ge}"
            case Le() if _is_shown(part.le):
                yield f"at most {part.le}"


def _is_shown(limit: Any) -> bool:
    return bool(abs(limit) < _LARGE)


def default_text(field: FieldInfo) -> str:
    """Return the default as in YAML; of a section only fields that differ from the section's own defaults."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        own = {name: _yaml(getattr(value, name)) for name in type(value).model_fields if _differs(value, name)}
        return f"`{{{', '.join(f'{name}: {text}' for name, text in own.items())}}}`" if own else ""
    return "none" if value is None else f"`{_yaml(value)}`"


def _differs(section: BaseModel, name: str) -> bool:
    field = type(section).model_fields[name]
    return not field.is_required() and getattr(section, name) != field.get_default(call_default_factory=True)


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-") if value != int(value) else f"{value:.1f}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    if value == "":
        return '""'
    return str(value)
