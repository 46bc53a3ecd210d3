"""The content of a recipe's file: one recipe, and under `variants` the changes of each variant.

Sections of a variant are merged with the recipe's, field by field. Any other value, also a list, replaces the recipe's. null
removes it, so the default applies. The result is validated like any recipe, and errors name the field in the variant.

A variant is an experiment, started by a user. So by default its automation is off and it has its own model name: schedules do
not train it, and it cannot become the recipe's champion.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from training.contract.config.fields import ConfigSection, NamePattern
from training.contract.config.json_object import JsonObject
from training.contract.config.recipe import Recipe

VariantName = Annotated[str, NamePattern(r"[A-Za-z0-9_-]+", "only letters, digits, `-` and `_`")]


class RecipeDocument(Recipe):
    """A recipe, and the changes of its variants by name."""

    variants: dict[VariantName, JsonObject] = Field(default={}, description="The changes of each variant, by its name.")

    @property
    def recipe(self) -> Recipe:
        """The recipe alone, without its variants; it is written beside results."""
        return Recipe.model_validate(self._written_fields())

    def resolved(self) -> dict[str, Recipe]:
        """Return each variant as a recipe. Raises ValidationError with the path of the wrong field in the file."""
        written = self._written_fields()
        changed = {name: _apply_changes(written, name, changes) for name, changes in self.variants.items()}
        return _Variants.model_validate({"variants": changed}).variants

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        self.resolved()
        return self

    def _written_fields(self) -> JsonObject:
        """Return the recipe's fields in the file, without defaults."""
        return self.model_dump(exclude_unset=True, exclude={"variants"})


class _Variants(ConfigSection):
    """A wrapper to give errors in a variant their path in the file."""

    variants: dict[str, Recipe]


def merged(section: Any, changes: Any) -> Any:
    """Return `section` with `changes` merged, by the rules of JSON Merge Patch (RFC 7396).

    One exception: null for a missing field stays, so validation finds a misspelled name.
    """
    if not isinstance(changes, Mapping):
        return changes
    result = dict(section) if isinstance(section, Mapping) else {}
    for name, change in changes.items():
        if change is None and name in result:
            del result[name]
        else:
            result[name] = merged(result.get(name), change)
    return result


def _apply_changes(written: Mapping[str, Any], variant: str, changes: Mapping[str, Any]) -> JsonObject:
    """Return the recipe with `changes`. It keeps only the time zone of the recipe's automation."""
    timezone = {name: value for name, value in written.get("automation", {}).items() if name == "timezone"}
    release = {**written["release"], "model_name": f"{written['release']['model_name']}-{variant}"}
    changed: JsonObject = merged({**written, "automation": timezone, "release": release}, changes)
    automation = changed.get("automation", {})
    return {**changed, "automation": {"on_change": False, **automation}} if isinstance(automation, Mapping) else changed
