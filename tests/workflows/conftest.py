"""A whole recipe in small, outside the project, and a home in which it was run."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.workflows.homes import ATTRIBUTES, PAIRS, Home, Looker, looker, write_recipe


@pytest.fixture(scope="session")
def demo_maker() -> ModuleType:
    """The script of the demo recipe, whose pairs, tokenizer and model are the tests' as well."""
    return importlib.import_module("workflows.defs.demo.make")


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory, demo_maker: ModuleType) -> Path:
    """A folder as a person would drop it: recipe, pairs, a base model with random weights."""
    folder = tmp_path_factory.mktemp("recipes") / "small"
    write_recipe(folder, ATTRIBUTES)
    tokenizer = demo_maker.write_data(folder, list(itertools.islice(demo_maker.pairs(), PAIRS)))
    demo_maker.make_model(tokenizer).save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Home]:
    return lambda: Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def materialized(small_recipe: Path, new_home: Callable[[], Home]) -> tuple[Home, dict[str, Any]]:
    """A home in which the small recipe was run once, on two processes, and what the command said."""
    home = new_home()
    return home, home.run(str(small_recipe))


@pytest.fixture
def looking(materialized: tuple[Home, dict[str, Any]], small_recipe: Path, tmp_path: Path) -> Iterator[Looker]:
    """A copy of that home, and of the recipe."""
    found = looker(materialized[0], small_recipe, tmp_path, copy_home=True)
    with found.instance:
        yield found
