"""The command `run`."""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from assets.execution.interruption import is_interruption
from assets.pipeline.graph import GRAPH
from training.contract.config.json_object import JsonObject
from workflows.cli import tables
from workflows.cli.group import print_json
from workflows.cli.options import as_json_option, find_free, recipe_argument
from workflows.cli.output import (
    REFUSALS,
    explained,
    print_error,
    print_found,
    reporting,
    results,
    stdout_for_results,
    user_console,
)
from workflows.cli.progress import at_work
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import LoadedRecipe


class AssetName(click.Choice[str]):
    """The name of an asset. An unknown one is answered by the most similar name, if any."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        similar = difflib.get_close_matches(str(value), self.choices, n=1)
        suggestion = f"Did you mean {similar[0]!r}? " if similar else ""
        return suggestion + super().get_invalid_choice_message(value, ctx)


@click.command()
@recipe_argument
@click.option(
    "--select",
    type=AssetName(list(GRAPH)),
    metavar="ASSET",
    help=f"Only this asset and everything upstream of it; one of {', '.join(GRAPH)}.",
)
@click.option("--variants", is_flag=True, help="The recipe, then its variants; one that fails does not stop the rest.")
@as_json_option
@reporting
def run(recipe: str, select: str | None, variants: bool, as_json: bool) -> None:
    """Materialize a recipe: compute what changed, reuse the rest."""
    found = find_free(recipe)
    if variants:
        _run_each(found, select, as_json)
        return
    report = _run(found[0], select)
    print_found(as_json, _json_of(report), tables.run_report, report, with_samples=True)
    if not report.succeeded:
        sys.exit(1)


def _run_each(found: Sequence[LoadedRecipe], select: str | None, as_json: bool) -> None:
    """Run one recipe after the other, until an interruption. One that fails outside its assets has an `error` and no report."""
    reports: list[JsonObject] = []
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


def _json_of(report: RunReport) -> JsonObject:
    return {name: value for name, value in asdict(report).items() if name not in ("samples", "is_served")}
