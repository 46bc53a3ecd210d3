"""Base models that reject unknown fields (`StrictModel`, `ConfigSection`), and types for the fields of a recipe."""

import datetime
import re
from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

_LONGEST_SHOWN = 80
# YAML 1.1 reads `5e-7` as text, so validation and JSON schema accept numeric text as well.
NUMERIC = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}]}
# Dagster's sample of a recipe needs `items`, which pydantic does not write for a tuple.
TWO_NUMBERS = {"type": "array", "items": NUMERIC, "minItems": 2, "maxItems": 2}
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), WithJsonSchema(NUMERIC)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), WithJsonSchema(NUMERIC)]
# A larger count can only be a typing error, and might not fit where counts are stored.
MOST = 2**31 - 1
Dtype = Literal["float32", "bfloat16"]
Count = Annotated[int, Field(ge=1, le=MOST)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # what torch takes


def shown(value: Any) -> str:
    """Return a value as YAML, for an error: shortened, and a boolean with its other spellings."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (YAML also reads yes, no, on and off as booleans)"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


def _check_not_empty(value: str) -> str:
    """Raise ValueError for an empty text: as a path it would be the working directory."""
    if not value.strip():
        raise ValueError(f"expected text, found {value!r}; leave the field out, or give it a value")
    return value


@dataclass(frozen=True)
class NamePattern:
    """The allowed characters of a name, as a regular `pattern` and as a readable `description` for errors."""

    pattern: str
    description: str

    def _check_name(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"expected {self.description}, found {value!r}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check_name, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^{self.pattern}$"}


Text = Annotated[str, AfterValidator(_check_not_empty)]
Name = Annotated[
    str,
    NamePattern(
        r"[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*", "only letters, digits, `-`, `_` and `.`, and not dots alone"
    ),
]
# Part of metric names. MLflow treats these as paths, and allows 250 characters.
SourceName = Annotated[
    str,
    StringConstraints(max_length=100),
    NamePattern(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", "only letters, digits, `-`, `_` and `.`, and no dot at the front"),
]


def _boolean_error(value: bool, expected: str) -> ValueError:
    """Return the error for a boolean: pydantic would accept true as 1, and the user may have meant the text yes or on."""
    return ValueError(f"expected {expected}, found {shown(value)}")


def _check_text(value: Any) -> Any:
    if isinstance(value, bool):
        raise _boolean_error(value, "text, in quotes")
    return value


# The name of a column, any text.
Column = Annotated[str, BeforeValidator(_check_text)]
# The sender of a message.
Role = Literal["system", "user", "assistant", "tool", "developer"]
# The name of a role in the user's data, any text.
TheirRole = Annotated[str, BeforeValidator(_check_text)]


def _check_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise _boolean_error(value, "a number")
    return value


Share = Annotated[float, BeforeValidator(_check_number), Field(ge=0, le=1), WithJsonSchema(NUMERIC)]
Fraction = Annotated[float, BeforeValidator(_check_number), Field(ge=0, lt=1), WithJsonSchema(NUMERIC)]


def _parse_date(value: Any) -> datetime.date:
    """Parse a date. pydantic alone would also accept a number, as seconds since 1970."""
    if isinstance(value, bool):
        raise _boolean_error(value, "a date")
    try:
        return value if type(value) is datetime.date else datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a date such as 2026-11-22, found {value}") from None


Date = Annotated[datetime.date, BeforeValidator(_parse_date)]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def unused_fields(self) -> Collection[str]:
        """Return the fields without an effect beside the others; they are left out of keys."""
        return ()


class ConfigSection(StrictModel):
    """A section of the recipe, written in YAML."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_not_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        annotation: Any = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and annotation is not bool:
            names = {int: "a number", float: "a number", str: "text, in quotes"}
            alternatives = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
            possible = [getattr(part, "__origin__", part) for part in alternatives]  # unwrap Annotated
            if expected := next((name for type_, name in names.items() if type_ in possible), None):
                raise _boolean_error(value, expected)
        return value  # pydantic rejects it for other types
