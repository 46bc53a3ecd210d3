"""The kinds of artifacts, each with the model of its details.

Details are small facts in a manifest, for users and for checks. They enter no key and no fingerprint. A model reads the details
of every earlier version: a later field has a default, and unknown fields are ignored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from typing_extensions import TypeVar  # with a default, as in Python 3.13

from training.contract.config.json_object import JsonObject
from training.contract.errors import StoreError


def _parse_figure(value: Any) -> Any:
    return float("nan") if value is None else value


Figure = Annotated[int | float, BeforeValidator(_parse_figure)]  # a number; JSON holds null for NaN


class StoredModel(BaseModel):
    """A part of details, as any version wrote it."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Provenance(StoredModel):
    """The software and hardware of a job (training.provenance)."""

    source: str
    libraries: dict[str, str]
    platform: str
    device: str
    threads: int
    world: int


class Details(StoredModel):
    """The details that artifacts of all kinds may have. `notes`: the job's messages to the user."""

    provenance: Provenance | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """Return the fields with a value."""
        return self.model_dump(mode="json", exclude_none=True)


DetailsT = TypeVar("DetailsT", bound=Details, default=Details, covariant=True)
OtherT = TypeVar("OtherT", bound=Details)


@dataclass(frozen=True)
class ArtifactKind(Generic[DetailsT]):
    """A kind of artifacts by its stored name."""

    name: str
    model: type[DetailsT]

    def parse(self, details: JsonObject, folder: Path) -> DetailsT:
        """Return the details in the manifest of `folder`. Raises StoreError if this version does not know their form."""
        try:
            return self.model.model_validate(details)
        except ValidationError as error:
            problem = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise StoreError(
                f"the details in {folder} have an unknown form ({problem}): another version of Pedigree wrote them; move the "
                "folder away and run the recipe again",
                "unknown-details",
            ) from error
