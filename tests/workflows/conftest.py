"""A small recipe outside the project, and a home in which it was run."""

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from filelock import FileLock

from assets.pipeline.graph import GRAPH
from tests.workflows.automation_ticks import Conditions
from tests.workflows.homes import ATTRIBUTES, PAIRS, Checkout, Home, check_out, write_recipe
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.question_pairs import make_model, pairs, write_data


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder for all test processes of this session."""
    own = tmp_path_factory.getbasetemp()
    (folder := (own if worker_id == "master" else own.parent) / "common").mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def prepared_homes(common_folder: Path) -> PreparedHomes:
    return PreparedHomes(common_folder / "prepared")


@pytest.fixture(scope="session")
def small_recipe(common_folder: Path) -> Path:
    """Return a recipe folder of a user: recipe, pairs, and a base model with random weights."""
    folder = common_folder / "recipes" / "small"
    with FileLock(common_folder / "recipes.lock"):
        if not (folder / "defs.yaml").exists():  # written last: another process may have failed before
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer = write_data(folder, list(itertools.islice(pairs(), PAIRS)))
            make_model(tokenizer).save_pretrained(folder / "base")
            write_recipe(folder, ATTRIBUTES)
    return folder


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Home]:
    return lambda: Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def first_run(small_recipe: Path, common_folder: Path) -> tuple[Home, dict[str, Any]]:
    """Return a home in which the small recipe was run once, on two processes, and the report of the run.

    It takes a minute, so all test processes share it, and no test changes it.
    """
    home, report = Home(common_folder / "home"), common_folder / "report.json"
    with FileLock(common_folder / "home.lock"):
        if not report.exists():
            report.write_text(json.dumps(home.run(str(small_recipe))))
    return home, json.loads(report.read_text())


@pytest.fixture(scope="session")
def materialized(
    first_run: tuple[Home, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Home, dict[str, Any]]:
    """Return a copy of that home for the tests of this process, which share their results in it."""
    home, report = first_run
    copy = tmp_path_factory.mktemp("materialized") / "home"
    subprocess.run(["cp", "--archive", home.path, copy], check=True)  # shutil would not keep its hard links
    return Home(copy), report


@pytest.fixture
def checkout(first_run: tuple[Home, dict[str, Any]], small_recipe: Path, tmp_path: Path) -> Iterator[Checkout]:
    """Return a copy of that home as it was after the run, and of the recipe, for one test."""
    found = check_out(first_run[0], small_recipe, tmp_path, copy_home=True)
    with found.instance:
        yield found


@pytest.fixture
def conditions(tmp_path: Path) -> Iterator[Conditions]:
    """Yield the conditions of a recipe with every asset materialized, after two ticks."""
    with dg.DagsterInstance.ephemeral() as instance:
        conditions = Conditions(write_recipe(tmp_path / "small", ATTRIBUTES), instance)
        assert conditions.tick() == set(), "a user starts the first run"
        conditions.materialize(1, *GRAPH)
        assert conditions.tick() == set()
        yield conditions
