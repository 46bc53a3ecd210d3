"""A process without Pedigree's variables, and a recipe that the command has run."""

import pytest

import pedigree

_VARIABLES = ("PEDIGREE_HOME", "DAGSTER_HOME", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe(materialized, small_recipe):
    """Return the recipe that was run once by the command."""
    return pedigree.load_recipe(small_recipe, home=materialized[0].path)
