"""The command `pedigree schema`."""

import json

import click

from workflows.recipes.recipe_schema import recipe_schema


@click.command()
def schema() -> None:
    """Print the JSON schema of a recipe's file, for editors."""
    click.echo(json.dumps(recipe_schema(), indent=2))
