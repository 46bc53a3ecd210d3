"""The command `pedigree`: its subcommands, their functions, and the output of results."""

import difflib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from assets.bodies.release import promotion_lock
from assets.execution.interruption import is_interruption
from assets.inputs.name_claims import check_name_is_free
from assets.pipeline.graph import GRAPH
from assets.views.pair_page import write_page
from training.contract.errors import StoreError, UsageError
from workflows.cli import tables
from workflows.cli.init import init
from workflows.cli.output import (
    REFUSALS,
    JsonGroup,
    explained,
    print_error,
    print_found,
    print_json,
    reporting,
    results,
    stdout_for_results,
    user_console,
)
from workflows.cli.progress import at_work
from workflows.cli.rescore import rescore
from workflows.cli.serve import chat, serve
from workflows.cli.ui import ui
from workflows.commands.compare import compare as do_compare
from workflows.commands.compare import last_evaluated
from workflows.commands.gc import collect
from workflows.commands.inspect_pair import inspect_row, inspection_page
from workflows.commands.plan import plan as make_plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.commands.verify import verify as do_verify
from workflows.orchestration.resources import build_services, pedigree_home, prepare_home
from workflows.recipes.discovery import LoadedRecipe, find_recipes
from workflows.state.status import status as find_status


class AssetName(click.Choice[str]):
    """The name of an asset. An unknown one is answered by the most similar name, if any."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        similar = difflib.get_close_matches(str(value), self.choices, n=1)
        suggestion = f"Did you mean {similar[0]!r}? " if similar else ""
        return suggestion + super().get_invalid_choice_message(value, ctx)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
_recipe = click.argument("recipe")


@click.group(cls=JsonGroup)
@click.version_option(package_name="pedigree")
def main() -> None:
    """Keep a preference-tuned language model up to date, with the lineage of every artifact.

    RECIPE is the name of a recipe in workflows/defs, or the path of any folder with a defs.yaml. Append / and a name for one
    of its variants: demo/hinge.
    """
    warnings.filterwarnings("ignore", module=r"dagster.*")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.model_registry").setLevel(logging.WARNING)  # it waits for no version here
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it raises everything it logs
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # it logs discarded connections with a traceback


@main.command()
@_recipe
@click.option(
    "--select",
    type=AssetName(list(GRAPH)),
    metavar="ASSET",
    help=f"Only this asset and everything upstream of it; one of {', '.join(GRAPH)}.",
)
@click.option("--variants", is_flag=True, help="The recipe, then its variants; one that fails does not stop the rest.")
@_as_json
@reporting
def run(recipe: str, select: str | None, variants: bool, as_json: bool) -> None:
    """Materialize a recipe: compute what changed, reuse the rest."""
    found = _find(recipe)
    if variants:
        _run_each(found, select, as_json)
        return
    report = _run(found[0], select)
    print_found(as_json, _json_of(report), tables.run_report, report, with_samples=True)
    if not report.succeeded:
        sys.exit(1)


def _run_each(found: Sequence[LoadedRecipe], select: str | None, as_json: bool) -> None:
    """Run one recipe after the other, until an interruption. One that fails outside its assets has an `error` and no report."""
    reports: list[dict[str, Any]] = []
    for loaded in found:
        user_console.print(f"[bold]{loaded.pipeline.name}[/]")
        try:
            report = _run(loaded, select)
        except REFUSALS as error:
            message = explained(error)
            reports.append({"recipe": loaded.pipeline.name, "succeeded": False, "error": message})
            print_error(message)
            is_stopped = is_interruption(message)
        else:
            reports.append(_json_of(report))
            is_stopped = report.interrupted
            if not as_json:
                tables.run_report(results, report, with_samples=False)
        if is_stopped:
            break
    if as_json:
        print_json({"recipe": found[0].pipeline.name, "runs": reports})
    if failed := [report["recipe"] for report in reports if not report["succeeded"]]:
        user_console.print(f"{len(reports)} of {len(found)} were run, {len(failed)} failed: {', '.join(failed)}")
        sys.exit(1)


def _run(loaded: LoadedRecipe, select: str | None) -> RunReport:
    with stdout_for_results(), at_work() as (services, instance):
        return materialize(loaded, services, instance, select)


def _json_of(report: RunReport) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name not in ("samples", "is_served")}


@main.command()
@_recipe
@_as_json
@reporting
def status(recipe: str, as_json: bool) -> None:
    """Show which assets are fresh, stale or missing now, and why."""
    loaded = _find(recipe)[0]
    with at_work() as (services, instance):
        found = find_status(loaded.pipeline, services, instance)
    assets = [asdict(asset) for asset in found]
    print_found(as_json, {"recipe": loaded.pipeline.name, "assets": assets}, tables.status, loaded.pipeline, found)


@main.command()
@_recipe
@_as_json
@reporting
def plan(recipe: str, as_json: bool) -> None:
    """Show what a run would compute and reuse, with counts. Rows and tokens are made for it; no model runs."""
    loaded = _find(recipe)[0]
    with at_work() as (services, instance):
        planned = make_plan(loaded.pipeline, services, instance)
    assets = [asdict(asset) for asset in planned]
    print_found(as_json, {"recipe": loaded.pipeline.name, "assets": assets}, tables.plan, loaded.pipeline, planned)


@main.command()
@_recipe
@click.option("--rows", type=click.IntRange(min=0), default=16, show_default=True, help="Pairs to score again.")
@_as_json
@reporting
def verify(recipe: str, rows: int, as_json: bool) -> None:
    """Hash all artifacts of the recipe again, and score some pairs again."""
    loaded = _find(recipe)[0]
    with at_work() as (services, instance):
        found = do_verify(loaded.pipeline, services, instance, rows)
    print_found(as_json, asdict(found), tables.verification, found)
    if not found.ok:
        sys.exit(1)


@main.command()
@_recipe
@click.option("--row", type=click.IntRange(min=0), required=True, help="A row of raw_preferences.")
@click.option("--score", is_flag=True, help="Compute the policy's log-probs if its evaluation lacks them.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the pair as a page to this file.")
@_as_json
@reporting
def inspect(recipe: str, row: int, score: bool, html: Path | None, as_json: bool) -> None:
    """Show one pair: its messages, tokens, trained tokens and log-probs."""
    loaded = _find(recipe)[0]
    with at_work() as (services, instance):
        found = inspect_row(loaded.pipeline, services, instance, row, score)
    if html is not None:
        page = inspection_page(loaded.pipeline, found)
        try:
            write_page(html, page)
        except OSError as error:
            raise StoreError(
                f"`--html {html}` cannot be written: {error.filename or html}: {error.strerror}; name another file",
                "unwritable-file",
            ) from error
        user_console.print(f"Written: {html.absolute()}", markup=False)
    print_found(as_json, asdict(found), tables.inspected, found)


@main.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--source", metavar="NAME", help="Use only the held-out pairs of sources with this `name`.")
@_as_json
@reporting
def compare(recipes: tuple[str, ...], source: str | None, as_json: bool) -> None:
    """Compare the latest evaluations side by side.

    Show different settings, results, and the paired differences to the first recipe. A single RECIPE is compared with its
    variants.
    """
    found = _find(recipes[0]) if len(recipes) == 1 else [_find(recipe)[0] for recipe in recipes]
    names = [loaded.pipeline.name for loaded in found]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{times} of the recipes to compare are called {name}; name each once", "duplicate-recipe")
    with at_work() as (services, instance):
        comparison = do_compare([last_evaluated(loaded.pipeline, services, instance, source) for loaded in found])
    print_found(as_json, asdict(comparison), tables.comparison, comparison)


@main.command()
@click.argument("name")
@_as_json
@reporting
def rollback(name: str, as_json: bool) -> None:
    """Make the previous champion of the model NAME champion again. NAME is a recipe's `release.model_name`."""
    prepare_home(pedigree_home())
    services = build_services(pedigree_home())
    with promotion_lock(services.store, name):
        restored, left = services.registry.rollback(name)
    result = {"model": name, "champion": restored.number, "rolled_back": left.number}
    print_found(as_json, result, tables.rolled_back, name, restored, left)


@main.command()
@click.option("--delete", is_flag=True, help="Delete the files; without this, only list them.")
@_as_json
@reporting
def gc(delete: bool, as_json: bool) -> None:
    """Find unreferenced files, and delete them with --delete.

    Registered versions, latest materializations, and unfinished runs and jobs keep their references.
    """
    with at_work() as (services, instance):
        found = collect(services, instance, delete)
    print_found(as_json, asdict(found), tables.collection, found)


for _command in (init, ui, rescore, serve, chat):
    main.add_command(_command)


def _find(recipe: str) -> list[LoadedRecipe]:
    """Return the recipe and its variants. Raises UsageError if another recipe in this home uses one of their names."""
    found = find_recipes(recipe)
    for loaded in found:
        check_name_is_free(pedigree_home(), loaded.pipeline)
    return found
