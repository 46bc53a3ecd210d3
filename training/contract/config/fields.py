"""Base models that reject unknown fields (`StrictModel`, `ConfigSection`), and types for the fields of a recipe."""

import datetime
import re
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
Count = Annotated[int, Field(ge=1, le=MOST)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # what torch takes


def shown(value: Any) -> str:
    """A value as a person who wrote YAML knows it, in an error: not too long, and a boolean with what else it may have been."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (YAML also reads yes, no, on and off as booleans)"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


def _text(given: str) -> str:
    """An empty path would be the folder that the process works in."""
    if not given.strip():
        raise ValueError(f"expected text, found {given!r}; leave the field out, or give it a value")
    return given


@dataclass(frozen=True)
class NamePattern:
    """How a name may be spelled: as `pattern`, which `words` tell a person, who would read the pattern itself otherwise."""

    pattern: str
    words: str

    def _spelled(self, given: str) -> str:
        if not re.fullmatch(self.pattern, given):
            raise ValueError(f"expected {self.words}, found {given!r}")
        return given

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._spelled, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^{self.pattern}$"}


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[
    str,
    NamePattern(
        r"[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*", "only letters, digits, `-`, `_` and `.`, and not dots alone"
    ),
]
# Part of the names of metrics, which MLflow takes for paths, of 250 characters at most.
SourceName = Annotated[
    str,
    StringConstraints(max_length=100),
    NamePattern(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", "only letters, digits, `-`, `_` and `.`, and no dot at the front"),
]


def _misread(given: bool, expected: str) -> ValueError:
    """pydantic accepts true as 1; and whoever wrote yes or on may have meant that word."""
    return ValueError(f"expected {expected}, found {shown(given)}")


def _quoted(given: Any) -> Any:
    if isinstance(given, bool):
        raise _misread(given, "text, in quotes")
    return given


# The name of a column, which may be any.
Column = Annotated[str, BeforeValidator(_quoted)]
# Who a message is from.
Role = Literal["system", "user", "assistant", "tool", "developer"]
# What somebody's data calls a role, which may be any text.
TheirRole = Annotated[str, BeforeValidator(_quoted)]


def _number(given: Any) -> Any:
    if isinstance(given, bool):
        raise _misread(given, "a number")
    return given


Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1), WithJsonSchema(NUMERIC)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1), WithJsonSchema(NUMERIC)]


def _date(given: Any) -> datetime.date:
    """pydantic also takes a number for a date, as seconds since 1970."""
    if isinstance(given, bool):
        raise _misread(given, "a date")
    try:
        return given if type(given) is datetime.date else datetime.date.fromisoformat(given)
    except (TypeError, ValueError):
        raise ValueError(f"expected a date such as 2026-11-22, found {given}") from None


Date = Annotated[datetime.date, BeforeValidator(_date)]


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConfigSection(StrictModel):
    """A part of what a person writes, in YAML."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_not_boolean(cls, given: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        kind: Any = cls.model_fields[info.field_name].annotation
        if isinstance(given, bool) and kind is not bool:
            kinds = {int: "a number", float: "a number", str: "text, in quotes"}
            alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
            # Of an Annotated, the type that it is about.
            possible = [getattr(part, "__origin__", part) for part in alternatives]
            if expected := next((words for k, words in kinds.items() if k in possible), None):
                raise _misread(given, expected)
        return given  # other types refuse it themselves
