"""Fixtures for all tests."""

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_registry.package_model import package

# Fixtures that start processes, run recipes or jobs, or evaluate a recipe's automation: tests that use them are slow.
SLOW_FIXTURES = {
    "baseline",
    "checkout",
    "conditions",
    "first_run",
    "forker",
    "host",
    "make_job",
    "materialized",
    "policy",
    "prepared_homes",
    "registered",
    "resident",
    "sensed",
    "server",
}
JOBS = Path(__file__).parent / "training" / "jobs"  # its tests run jobs that train and score
_FOLDERS = itertools.count()
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from the 800,000 objects of imports, as training.contract.system.imports does."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, those of jobs and those that use a slow fixture, before `-m` selects. Put their files first."""
    for item in items:
        if JOBS in item.path.parents or SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    # Files with slow tests come first: with --no-loadscope-reorder, the short files then fill the end of a run on many cores.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return an empty folder with a path that no earlier test had.

    pytest uses the path of a removed folder again, and MLflow keeps connections to databases by their paths.
    """
    (folder := tmp_path / str(next(_FOLDERS))).mkdir()
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real preference data, tokenizers and small models. CI requires it; elsewhere the test is skipped."""
    if SHARED_DATA.is_dir():
        return SHARED_DATA
    message = f"needs the real preference data, tokenizers and models in {SHARED_DATA}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def packaged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Package policies in this process: a process of its own spends seconds on imports."""
    monkeypatch.setattr("model_registry.files._package", package)
