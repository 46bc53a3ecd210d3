"""The commands about the file of a recipe: `init` writes one, `schema` describes it to editors."""

import json
from pathlib import Path

import click

from workflows.cli import tables
from workflows.cli.output import print_found, reporting
from workflows.recipes.recipe_schema import recipe_schema
from workflows.recipes.scaffold import init_recipe


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--data", metavar="FILE", help="Preference pairs: a file, a folder or a glob. Proposes epochs for them.")
@click.option("--model", metavar="FOLDER", help="The model to tune. Proposes a learning rate for its size.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@reporting
def init(folder: Path, data: str | None, model: str | None, as_json: bool) -> None:
    """Write a recipe: FOLDER/defs.yaml. Without --data and --model, fill them in later."""
    file = init_recipe(folder, data, model)
    missing = [field for field, value in (("data.sources", data), ("reference.model", model)) if value is None]
    print_found(as_json, {"file": str(file)}, tables.new_recipe, file, missing)


@click.command()
def schema() -> None:
    """Print the JSON schema of a recipe's file, for editors."""
    click.echo(json.dumps(recipe_schema(), indent=2))
