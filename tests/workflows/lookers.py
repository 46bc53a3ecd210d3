"""Looking at a home that was made, in this process: what is in it, and a copy to do harm to."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from assets.pipeline import Pipeline, Services
from tests.workflows.conftest import Home, write_recipe
from workflows.recipes import load_recipe
from workflows.resources import build_services


@dataclass
class Looker:
    """A home with its store and its Dagster instance. Recipes edited in `folder` keep the name of the one that was run."""

    home: Path
    folder: Path
    instance: dg.DagsterInstance

    @property
    def services(self) -> Services:
        return build_services(self.home)

    @property
    def pipeline(self) -> Pipeline:
        return load_recipe(self.folder).pipeline


def looker(home: Home, recipe: Path, workplace: Path, copy_home: bool = False) -> Looker:
    """`home` as it is, or a copy of it, with a copy of the recipe that may be edited."""
    folder = workplace / recipe.name
    shutil.copytree(recipe, folder)
    place = Path(shutil.copytree(home.path, workplace / "home")) if copy_home else home.path
    return Looker(place, folder, dg.DagsterInstance.from_config(str(place / "dagster")))


def edit(looker: Looker, attributes: dict[str, object]) -> None:
    write_recipe(looker.folder, attributes)
