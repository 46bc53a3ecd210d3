"""`import pedigree` in one process with several homes, environment variables and event loops."""

import asyncio
import os

import pytest

import pedigree
from tests.workflows.homes import check_error
from workflows.api.event_loop import no_running_loop
from workflows.api.home_session import open_home

pytestmark = pytest.mark.slow


def test_another_loop_runs_inside_a_running_one():
    async def name():
        await asyncio.sleep(0)
        return asyncio.current_task().get_name()

    async def cell():
        own = asyncio.current_task(), asyncio.get_running_loop()
        with no_running_loop():
            inner = asyncio.run(name())
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        return inner, own == (asyncio.current_task(), asyncio.get_running_loop())

    inner, is_restored = asyncio.run(cell())
    assert inner.startswith("Task-") and is_restored


def test_two_homes_in_turn_are_separate_and_leave_the_environment(materialized, small_recipe, tmp_path):
    here = pedigree.load_recipe(small_recipe, home=materialized[0].path)
    there = pedigree.load_recipe(small_recipe, home=tmp_path / "other")
    for _ in range(2):
        assert {asset.state for asset in here.status()} == {"fresh"}
        assert {asset.state for asset in there.status()} == {"missing"}
    assert (there.champion(), there.versions(), here.champion().number) == (None, [], 1)
    assert not any(
        name in ("PEDIGREE_HOME", "DAGSTER_HOME", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI") for name in os.environ
    )


def test_call_in_another_home_meanwhile_is_refused(materialized, recipe, small_recipe, tmp_path, monkeypatch):
    """A call in the same home is allowed, and the default home does not become that of a call."""
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path / "default"))
    other = pedigree.load_recipe(small_recipe, home=tmp_path / "other")
    with open_home(materialized[0].path):
        assert os.environ["PEDIGREE_HOME"] == str(materialized[0].path)
        assert {asset.state for asset in recipe.status()} == {"fresh"}
        assert pedigree.load_recipe(small_recipe).home == tmp_path / "default"
        with pytest.raises(pedigree.UsageError) as caught:
            other.status()
    check_error(caught.value, "two-homes", materialized[0].path, tmp_path / "other")
    assert os.environ["PEDIGREE_HOME"] == str(tmp_path / "default")
    assert {asset.state for asset in other.status()} == {"missing"}


def test_dagster_home_of_another_home_is_refused(small_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "records"))
    assert {asset.state for asset in pedigree.load_recipe(small_recipe).status()} == {"missing"}
    assert (tmp_path / "records" / "dagster.yaml").exists() and not (tmp_path / "home" / "dagster").exists()
    with pytest.raises(pedigree.UsageError) as caught:
        pedigree.load_recipe(small_recipe, home=tmp_path / "other")
    check_error(caught.value, "two-homes", tmp_path / "records", tmp_path / "other")


def test_default_home_is_in_the_working_directory_of_the_load(small_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = pedigree.load_recipe(small_recipe)
    assert recipe.home == tmp_path / ".pedigree" and not recipe.home.exists()
    assert repr(recipe) == f"Recipe({str(small_recipe)!r}, home={str(tmp_path / '.pedigree')!r})"
