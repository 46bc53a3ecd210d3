"""The command `pedigree ui`: the recipes to show, and the printed addresses."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from assets.execution.run_liveness import fail_orphaned_runs
from assets.pipeline.pipeline import Services, identifier
from model_registry.connection import connect, page
from model_registry.tracking import charts_page
from training.contract.errors import PedigreeError
from workflows.cli.output import reporting, results, user_console
from workflows.commands.run import warn_of_unlimited_gpu
from workflows.orchestration.resources import build_services, dagster_instance, pedigree_home
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import (
    ALONE_VARIABLE,
    ExtraRecipe,
    extra_recipes,
    load_recipes,
    recipe_place,
    recipe_problem,
    shows_project,
)
from workflows.recipes.recipe_files import recipes_in
from workflows.servers.web_servers import CODE_LOCATION, web_servers

_port = click.IntRange(1, 65535)


@click.command()
@click.argument("recipes", nargs=-1)
@click.option(
    "--port", type=_port, default=3000, show_default=True, help="Port of Dagster's web server, if it is free."
)
@click.option(
    "--mlflow-port", type=_port, default=5000, show_default=True, help="Port of MLflow's web server, if it is free."
)
@click.option(
    "--allow-host",
    "hosts",
    metavar="NAME[:PORT]",
    multiple=True,
    help="Name of a proxy that passes requests on, with its port if that is not the default.",
)
@reporting
def ui(recipes: tuple[str, ...], port: int, mlflow_port: int, hosts: tuple[str, ...]) -> None:
    """Start Dagster's and MLflow's web servers, until Ctrl-C. They listen only on loopback.

    RECIPES are the recipes to show, or folders of recipes. Without them, the recipes of the project are shown. Requests that
    pages of other sites make are refused.
    """
    home = pedigree_home()
    folders = [recipe_place(text) for text in recipes]
    if folders:
        os.environ[ALONE_VARIABLE] = os.pathsep.join(map(str, folders))
    listed = extra_recipes()
    _report_problems(listed, folders)
    services = build_services(home)
    registry = services.registry
    # Otherwise the servers' processes would all make the tables of a new home at once.
    with dagster_instance() as instance:
        for address in {registry.tracking_uri, registry.uri}:
            connect(address)
        fail_orphaned_runs(instance, home)
        warn_of_unlimited_gpu(instance)
        reference = instance.get_ref()
    with web_servers(home, reference, registry, (port, mlflow_port), hosts, user_console.print) as pages:
        for address in _graphs(pages.dagster, listed):
            results.print(f"Dagster: {address}", soft_wrap=True)
        for address in _pages_of_runs(pages.mlflow, services, listed):
            results.print(f"MLflow:  {address}", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            pages.processes.watch()


def _report_problems(listed: list[ExtraRecipe], named: list[Path]) -> None:
    """Print the errors in the recipes `listed`. Raise the error of a recipe named in the command."""
    for extra in listed:
        if (error := extra.fault or recipe_problem(extra.folder)) is None:
            continue
        if extra.folder in named:
            raise error
        user_console.print(
            f"{error}\nThe runs of {extra.name} fail until it is repaired.", markup=False, soft_wrap=True
        )


def _pages_of_runs(mlflow: str, services: Services, listed: list[ExtraRecipe]) -> list[str]:
    """Return the address of the charts of each recipe with runs; without runs, the list of experiments.

    From that list, a click leads to MLflow's page for chat traces, which is empty.
    """
    numbers = (services.tracker.experiment_id(name) for name in dict.fromkeys(_experiments(listed)))
    pages = [charts_page(mlflow, number) for number in numbers if number is not None]
    return pages or [page(mlflow, "experiments")]


def _graphs(dagster: str, listed: list[ExtraRecipe]) -> list[str]:
    """Return the address of the graph of each recipe; without a recipe, the list of assets."""
    groups = [identifier(family) for family in dict.fromkeys(_experiments(listed))]
    return [f"{dagster}/locations/{CODE_LOCATION}/asset-groups/{group}/lineage" for group in groups] or [
        f"{dagster}/assets"
    ]


def _experiments(listed: list[ExtraRecipe]) -> Iterator[str]:
    """Yield the names of the experiments of all recipes shown."""
    folders = [*(recipes_in(DEFS) if shows_project() else ()), *(extra.folder for extra in listed)]
    for folder in folders:
        with suppress(PedigreeError):  # its error was printed before
            yield from (loaded.pipeline.family for loaded in load_recipes(folder))
