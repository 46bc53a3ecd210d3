"""The commands that put away results: `gc`, `rescore` and `rollback`.

`rescore` is the remedy if the reference check fails because of stored log-probs of the reference model. They are kept forever,
and found by weights, dtype and tokens. So after any error in them, such as an unnoticed change of a file, no other command
computes them again.
"""

from dataclasses import asdict

import click

from assets.bodies.release.released_model import promotion_lock
from assets.execution.rescore import SetAside, set_scores_aside
from training.contract.config.json_object import JsonObject
from workflows.cli import tables
from workflows.cli.options import as_json_option, find_free, recipe_argument
from workflows.cli.output import print_found, reporting
from workflows.cli.progress import at_work
from workflows.commands.gc import collect
from workflows.commands.run import in_gpu_pool
from workflows.orchestration.resources import build_services, pedigree_home, prepare_home


@click.command()
@click.option("--delete", is_flag=True, help="Delete the files; without this, only list them.")
@as_json_option
@reporting
def gc(delete: bool, as_json: bool) -> None:
    """Find unreferenced files, and delete them with --delete.

    Registered versions, latest materializations, and unfinished runs and jobs keep their references.
    """
    with at_work() as (services, instance):
        found = collect(services, instance, delete)
    print_found(as_json, asdict(found), tables.collection, found)


@click.command()
@click.argument("name")
@as_json_option
@reporting
def rollback(name: str, as_json: bool) -> None:
    """Make the previous champion of the model NAME champion again. NAME is a recipe's `release.model_name`."""
    prepare_home(pedigree_home())
    services = build_services(pedigree_home())
    with promotion_lock(services.store, name):
        restored, left = services.registry.rollback(name)
    result = {"model": name, "champion": restored.number, "rolled_back": left.number}
    print_found(as_json, result, tables.rolled_back, name, restored, left)


@click.command()
@recipe_argument
@as_json_option
@reporting
def rescore(recipe: str, as_json: bool) -> None:
    """Set aside all log-probs of the reference model: the next run scores every response again.

    Use it if the reference check or `pedigree verify` finds wrong log-probs.
    """
    pipeline = find_free(recipe)[0].pipeline
    with at_work() as (services, instance):
        found = in_gpu_pool("rescore", services, instance, lambda: set_scores_aside(pipeline, services, instance))
    print_found(as_json, _json_of(found), tables.set_aside, pipeline, found)


def _json_of(found: SetAside) -> JsonObject:
    return asdict(found) | {"folders": [str(folder) for folder in found.folders]}
