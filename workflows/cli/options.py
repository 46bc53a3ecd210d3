"""Options and arguments that several commands have, and the recipes that an argument names."""

import click

from assets.inputs.name_claims import check_name_is_free
from workflows.orchestration.resources import pedigree_home
from workflows.recipes.discovery import LoadedRecipe, find_recipes

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
recipe_argument = click.argument("recipe")


def find_free(recipe: str) -> list[LoadedRecipe]:
    """Return the recipe and its variants. Raises UsageError if another recipe in this home uses one of their names."""
    found = find_recipes(recipe)
    for loaded in found:
        check_name_is_free(pedigree_home(), loaded.pipeline)
    return found
