"""A name belongs to one pipeline in a home: a second folder with that name, for another model, is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from assets.inputs.name_claims import check_name_is_free, claim_name
from assets.pipeline.pipeline import Pipeline
from tests.workflows.homes import ATTRIBUTES, check_error, write_recipe
from training.contract.errors import UsageError
from workflows.cli.main import main
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import ExtraRecipe, extra_recipes, load_recipe, recipe_place

OTHER = {**ATTRIBUTES, "release": {"model_name": "other"}}


def written(folder: Path, attributes: dict[str, Any], variant: str | None = None) -> Pipeline:
    return load_recipe(write_recipe(folder, attributes), variant).pipeline


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home in which the recipe in `first/mine` was run."""
    home = tmp_path / "home"
    claim_name(home, written(tmp_path / "first" / "mine", ATTRIBUTES))
    return home


def test_another_recipe_of_the_same_name_is_refused_until_the_first_is_gone(tmp_path, home):
    second = written(tmp_path / "second" / "mine", OTHER)
    with pytest.raises(UsageError) as caught:
        claim_name(home, second)
    check_error(caught.value, "name-taken", f"{tmp_path}/first/mine", f"{tmp_path}/second/mine", "small", "other")
    shutil.rmtree(tmp_path / "first")
    claim_name(home, second)
    with pytest.raises(UsageError, match=rf"{tmp_path}/second/mine .*other.*\[name-taken\]"):
        check_name_is_free(home, written(tmp_path / "first" / "mine", ATTRIBUTES))


def test_another_version_of_a_recipe_goes_on_with_its_pipeline(tmp_path, home):
    edited = {**ATTRIBUTES, "training": {"loss": {"beta": 0.5}}}
    claim_name(home, written(tmp_path / "copy" / "mine", edited))
    claim_name(home, written(tmp_path / "copy" / "mine", OTHER))
    check_name_is_free(tmp_path / "elsewhere", written(tmp_path / "first" / "mine", ATTRIBUTES))


@pytest.mark.parametrize("note", ["", "[]", '{"folder": "x"}'])
def test_corrupt_claim_is_written_again(tmp_path, home, note):
    (home / "names" / "mine.json").write_text(note)
    claim_name(home, written(tmp_path / "second" / "mine", OTHER))
    with pytest.raises(UsageError, match=r"\[name-taken\]"):
        check_name_is_free(home, load_recipe(tmp_path / "first" / "mine").pipeline)


def test_a_variant_is_not_taken_for_the_recipe_of_its_name(tmp_path, home):
    changed = {**ATTRIBUTES, "variants": {"hot": {"training": {"loss": {"beta": 0.5}}}}}
    claim_name(home, written(tmp_path / "first" / "mine", changed, "hot"))
    other = written(tmp_path / "second" / "mine-hot", OTHER)
    with pytest.raises(UsageError, match=r" mine-hot .*rename this folder.*\[name-taken\]"):
        check_name_is_free(home, other)
    claim_name(tmp_path / "another home", other)
    with pytest.raises(UsageError, match=r" mine-hot .*rename the variant hot.*\[name-taken\]"):
        check_name_is_free(tmp_path / "another home", load_recipe(tmp_path / "first" / "mine", "hot").pipeline)


def test_command_refuses_a_claimed_name_first(tmp_path, home, monkeypatch):
    monkeypatch.setenv("PEDIGREE_HOME", str(home))
    monkeypatch.setenv("DAGSTER_HOME", str(home / "dagster"))
    folder = write_recipe(tmp_path / "second" / "mine", OTHER)
    done = CliRunner().invoke(main, ["run", str(folder)])
    assert done.exit_code == 2
    check_error(done.stderr, "name-taken", f"{home}/names/mine.json")
    assert sorted(path.name for path in home.iterdir()) == ["names"]


@pytest.mark.parametrize("name", ["mine", "demo"])
def test_the_web_servers_get_no_two_recipes_of_one_name(tmp_path, monkeypatch, name):
    folders = [write_recipe(tmp_path / place / name, ATTRIBUTES) for place in ("first", "second")]
    done = CliRunner().invoke(main, ["ui", *map(str, folders)], env={"PEDIGREE_ONLY_RECIPES": ""})
    assert done.exit_code == 2
    check_error(done.stderr, "duplicate-name", name, folders[0 if name == "mine" else 1].parent)
    monkeypatch.setenv("PEDIGREE_RECIPES", f"{folders[0]}:{folders[0]}")
    if name == "mine":
        assert extra_recipes() == [ExtraRecipe(folders[0], "mine", None)]
        monkeypatch.setenv("PEDIGREE_RECIPES", str(DEFS / "demo"))
        assert extra_recipes() == [], "the project's recipes are shown anyway"


def test_recipes_of_a_folder_come_and_go_while_the_web_servers_run(tmp_path, monkeypatch):
    """Each run loads the recipes again, from a folder of its own, so a deleted folder must not block the others."""
    for name in ("one", "two"):
        write_recipe(tmp_path / "recipes" / name, ATTRIBUTES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PEDIGREE_RECIPES", f"{recipe_place('recipes')}:{recipe_place('recipes/two')}:{recipe_place('demo')}"
    )
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "recipes" / "one").rename(tmp_path / "recipes" / "three")
    assert extra_recipes() == [ExtraRecipe(tmp_path / "recipes" / name, name, None) for name in ("three", "two")], (
        "demo is the project's"
    )
    with pytest.raises(UsageError, match=r"'recipes/one' .*\[unknown-recipe\]"):
        recipe_place("recipes/one")


def test_the_web_servers_do_not_start_with_a_recipe_that_is_wrong(tmp_path):
    folder = write_recipe(tmp_path / "wrong", yaml.safe_load("{data: {sources: []}}"))
    done = CliRunner().invoke(main, ["ui", str(folder)], env={"PEDIGREE_ONLY_RECIPES": ""})
    assert done.exit_code == 2 and "[missing-field]" in done.stderr and "reference: " in done.stderr
