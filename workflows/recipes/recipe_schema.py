"""The JSON schema of a recipe's file, by which editors check and complete it: `pedigree schema`."""

from typing import Any

from assets.inputs.recipe_yaml import TYPE
from training.contract.config.variants import RecipeDocument


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a `defs.yaml`: its `type`, and a recipe as its `attributes`."""
    attributes = RecipeDocument.model_json_schema()
    definitions = attributes.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pedigree recipe",
        "type": "object",
        "properties": {"type": {"const": TYPE, "description": "The kind of definitions."}, "attributes": attributes},
        "required": ["type", "attributes"],
        "additionalProperties": False,
        "$defs": definitions,
    }
