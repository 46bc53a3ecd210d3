"""What a recipe's file holds: one recipe, and under `variants` what is different in each of its variants.

A variant is the recipe with changes: sections are merged, field by field; any other value, a list too, replaces the recipe's;
null removes it, so that the default holds. The outcome is validated like any recipe, and an error names the variant's own
field.

A variant is an experiment that a person starts and looks at. So unless it says otherwise it has no automation, and a model name
of its own: no schedule trains it, and it cannot become the champion that others use.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from training.contract.config.fields import ConfigSection, NamePattern
from training.contract.config.recipe import Recipe

VariantName = Annotated[str, NamePattern(r"[A-Za-z0-9_-]+", "only letters, digits, `-` and `_`")]


class RecipeDocument(Recipe):
    """A recipe and the changes that make its variants, by their names."""

    variants: dict[VariantName, dict[str, Any]] = Field(default={})

    @property
    def recipe(self) -> Recipe:
        """The recipe alone, without its variants; it is written beside results."""
        return Recipe.model_validate(self._written())

    def resolved(self) -> dict[str, Recipe]:
        """Each variant as a recipe. Raises ValidationError with the path of what is wrong in the file."""
        written = self._written()
        changed = {name: _experiment(written, name, changes) for name, changes in self.variants.items()}
        return _Variants.model_validate({"variants": changed}).variants

    @model_validator(mode="after")
    def _variants_are_recipes(self) -> Self:
        self.resolved()
        return self

    def _written(self) -> dict[str, Any]:
        """The fields of the recipe that the file names; what has its default is left out."""
        return self.model_dump(exclude_unset=True, exclude={"variants"})


class _Variants(ConfigSection):
    """Gives errors in a variant the path that they have in the file."""

    variants: dict[str, Recipe]


def merged(section: Any, changes: Any) -> Any:
    """`section` with `changes` made, by the rules of JSON Merge Patch (RFC 7396).

    With one exception: null for a field that is not there stays, so that validation finds a misspelled name.
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


def _experiment(written: Mapping[str, Any], variant: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with `changes` made; of its automation only the time zone stays, unless they ask for more."""
    timezone = {name: value for name, value in written.get("automation", {}).items() if name == "timezone"}
    release = {**written["release"], "model_name": f"{written['release']['model_name']}-{variant}"}
    changed: dict[str, Any] = merged({**written, "automation": timezone, "release": release}, changes)
    automation = changed.get("automation", {})
    return {**changed, "automation": {"on_change": False, **automation}} if isinstance(automation, Mapping) else changed
