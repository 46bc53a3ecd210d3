"""The settings in a derivation's key: one rule for all sections.

Every field of a section counts, except

    unused fields     fields without an effect beside the others, such as `epochs` beside `max_steps` (`unused_fields`)
    added fields      fields that a later version of this project added, as long as they have their default (`AddedLater`)

So a new field leaves existing keys unchanged.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel

from training.contract.config.fields import StrictModel
from training.contract.config.json_object import JsonObject

_T = TypeVar("_T")
_LATER = "added later"
AddedLater = Annotated[_T, _LATER]  # the type of a field that is left out of keys at its default


class Settings(StrictModel):
    """The settings of a derivation, the same in the process that launches a job and in the job."""


def key_settings(section: BaseModel) -> JsonObject:
    """Return the fields of `section` that count in a key, as JSON values."""
    left_out = set(section.unused_fields()) if isinstance(section, StrictModel) else set()
    left_out |= {
        name
        for name, field in type(section).model_fields.items()
        if _LATER in field.metadata and getattr(section, name) == field.get_default()
    }
    written = section.model_dump(mode="json", exclude=left_out)
    return {name: _nested(getattr(section, name), value) for name, value in written.items()}


def _nested(value: Any, written: Any) -> Any:
    """Return `written`, the JSON of `value`, with the rule applied to sections in it."""
    if isinstance(value, BaseModel):
        return key_settings(value)
    if isinstance(value, (tuple, list)):
        return [_nested(item, of_item) for item, of_item in zip(value, written, strict=True)]
    return written
