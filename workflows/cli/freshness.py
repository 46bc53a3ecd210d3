"""The commands about the present state of a recipe: `status`, `plan` and `verify`."""

import sys
from dataclasses import asdict

import click

from workflows.cli import tables
from workflows.cli.options import as_json_option, find_free, recipe_argument
from workflows.cli.output import print_found, reporting
from workflows.cli.progress import at_work
from workflows.commands.plan import plan as make_plan
from workflows.commands.verify import verify as do_verify
from workflows.state.status import status as find_status


@click.command()
@recipe_argument
@as_json_option
@reporting
def status(recipe: str, as_json: bool) -> None:
    """Show which assets are fresh, stale or missing now, and why."""
    loaded = find_free(recipe)[0]
    with at_work() as (services, instance):
        found = find_status(loaded.pipeline, services, instance)
    assets = [asdict(asset) for asset in found]
    print_found(as_json, {"recipe": loaded.pipeline.name, "assets": assets}, tables.status, loaded.pipeline, found)


@click.command()
@recipe_argument
@as_json_option
@reporting
def plan(recipe: str, as_json: bool) -> None:
    """Show what a run would compute and reuse, with counts. Rows and tokens are made for it; no model runs."""
    loaded = find_free(recipe)[0]
    with at_work() as (services, instance):
        planned = make_plan(loaded.pipeline, services, instance)
    assets = [asdict(asset) for asset in planned]
    print_found(as_json, {"recipe": loaded.pipeline.name, "assets": assets}, tables.plan, loaded.pipeline, planned)


@click.command()
@recipe_argument
@click.option("--rows", type=click.IntRange(min=0), default=16, show_default=True, help="Pairs to score again.")
@as_json_option
@reporting
def verify(recipe: str, rows: int, as_json: bool) -> None:
    """Hash all artifacts of the recipe again, and score some pairs again."""
    loaded = find_free(recipe)[0]
    with at_work() as (services, instance):
        found = do_verify(loaded.pipeline, services, instance, rows)
    rescored = [row.model_dump() for row in found.rescored]
    print_found(as_json, asdict(found) | {"rescored": rescored}, tables.verification, found)
    if not found.ok:
        sys.exit(1)
