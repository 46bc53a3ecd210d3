"""The command `pedigree rescore`: the remedy if the reference check fails because of stored log-probs of the reference model.

They are kept forever, and found by weights, dtype and tokens. So after any error in them, such as an unnoticed change of a
file, no other command computes them again.
"""

from dataclasses import asdict
from typing import Any

import click

from assets.execution.rescore import SetAside, set_scores_aside
from assets.inputs.name_claims import check_name_is_free
from workflows.cli import tables
from workflows.cli.output import print_found, reporting
from workflows.cli.progress import at_work
from workflows.commands.run import in_gpu_pool
from workflows.orchestration.resources import pedigree_home
from workflows.recipes.discovery import find_recipes


@click.command()
@click.argument("recipe")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@reporting
def rescore(recipe: str, as_json: bool) -> None:
    """Set aside all log-probs of the reference model: the next run scores every response again.

    Use it if the reference check or `pedigree verify` finds wrong log-probs.
    """
    pipeline = find_recipes(recipe)[0].pipeline
    check_name_is_free(pedigree_home(), pipeline)
    with at_work() as (services, instance):
        found = in_gpu_pool("rescore", services, instance, lambda: set_scores_aside(pipeline, services, instance))
    print_found(as_json, _json_of(found), tables.set_aside, pipeline, found)


def _json_of(found: SetAside) -> dict[str, Any]:
    return asdict(found) | {"folders": [str(folder) for folder in found.folders]}
