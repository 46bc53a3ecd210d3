"""What every part of a recipe is made of: a frozen section that refuses unknown fields, and the numbers it holds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

# YAML 1.1 reads `5e-7` as text; people write it, so both the validation and the JSON schema take numeric text as well.
NUMERIC = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}]}
# Dagster's sample of a recipe needs `items`, which pydantic does not write for a tuple.
TWO_NUMBERS = {"type": "array", "items": NUMERIC, "minItems": 2, "maxItems": 2}
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), WithJsonSchema(NUMERIC)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), WithJsonSchema(NUMERIC)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), WithJsonSchema(NUMERIC)]
Share = Annotated[float, Field(ge=0, le=1), WithJsonSchema(NUMERIC)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]  # what torch takes
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
