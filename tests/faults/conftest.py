"""Fixtures: the undisturbed run, a process that starts commands, and a function that records the outcome of a fault."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.faults.disturbed import RECIPE, CommandHost, Undisturbed, command_host, end_commands
from tests.workflows.conftest import common_folder, small_recipe  # noqa: F401
from tests.workflows.homes import Home, write_recipe


@pytest.fixture(scope="session")
def undisturbed(small_recipe: Path, common_folder: Path) -> Undisturbed:  # noqa: F811
    """Run the recipe once, for all test processes. No test changes its home."""
    folder, home, report = (common_folder / name for name in ("faults/small", "faults/home", "faults/report.json"))
    with FileLock(common_folder / "faults.lock"):
        if not report.exists():
            shutil.rmtree(common_folder / "faults", ignore_errors=True)
            shutil.copytree(small_recipe, folder)
            write_recipe(folder, RECIPE)
            report.write_text(json.dumps(Home(home).run(str(folder))))
    assets = json.loads(report.read_text())["assets"]
    return Undisturbed(folder, Home(home), {asset["asset"]: asset["fingerprint"] for asset in assets})


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandHost]:
    with command_host(tmp_path_factory.mktemp("commands")) as started:
        yield started


@pytest.fixture(autouse=True)
def ended_commands() -> Iterator[None]:
    yield
    end_commands()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that appends the outcome of a fault to the file in FAULTS_FILE, for docs/reference/faults.md.

    `seconds`: until no process was left, or until the answer about an input. `same`: the next run has the undisturbed run's
    artifacts.
    """

    def note(stage: str, fault: str, outcome: str, seconds: float | None = None, same: bool | None = None) -> None:
        if name := os.environ.get("FAULTS_FILE"):
            row = {"stage": stage, "fault": fault, "outcome": outcome, "seconds": seconds, "same": same}
            with open(name, "a", encoding="utf-8") as file:
                file.write(json.dumps({"file": request.path.stem, **row}) + "\n")

    return note
