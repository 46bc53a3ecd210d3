"""The command `pedigree rescore`: what to do where the proof of step 0 refutes the stored log-probs of the reference model.

They are kept for good, and found by their weights, dtype and tokens; so whatever made them wrong, a file that changed unseen
say, no other command makes them anew.
"""

from dataclasses import asdict
from typing import Any

import click

from assets.names import refuse_namesake
from assets.rescoring import SetAside, set_scores_aside
from workflows import show
from workflows.execution import in_gpu_pool
from workflows.progress import at_work
from workflows.recipes import find_recipes
from workflows.reporting import print_found, reporting
from workflows.resources import pedigree_home


@click.command()
@click.argument("recipe")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@reporting
def rescore(recipe: str, as_json: bool) -> None:
    """Set aside all log-probs of the reference model: the next run scores every response again.

    For log-probs that are not right, as the proof of step 0 or `pedigree verify` says.
    """
    pipeline = find_recipes(recipe)[0].pipeline
    refuse_namesake(pedigree_home(), pipeline)
    with at_work() as (services, instance):
        found = in_gpu_pool("rescore", services, instance, lambda: set_scores_aside(pipeline, services, instance))
    print_found(as_json, _json_of(found), show.set_aside, pipeline, found)


def _json_of(found: SetAside) -> dict[str, Any]:
    return asdict(found) | {"folders": [str(folder) for folder in found.folders]}
