"""Recipes outside the project, listed in PEDIGREE_RECIPES. An invalid or unreadable one leaves the others alone."""

import os
import re
import shutil
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from assets.inputs.recipe_yaml import variant_names
from assets.pipeline.graph import GRAPH
from tests.privileges import without_privileges
from tests.workflows.homes import ATTRIBUTES, check_error, write_recipe
from training.contract.errors import UsageError
from workflows.cli.main import main
from workflows.definitions import defs
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import extra_recipes, load_recipes, recipe_folders, recipe_place

pytestmark = pytest.mark.slow


def assert_fails_alone(name: str, code: str, values: list[str], others: set[str]) -> None:
    found, prefix = defs(), name.replace("-", "_")
    assert {key.to_user_string() for key in found.resolve_asset_graph().get_all_asset_keys()} == {
        f"{recipe}/{asset}" for recipe in (name, *others) for asset in GRAPH
    }
    for job in (f"{prefix}_retrain", f"{prefix}_look"):
        run = found.resolve_job_def(job).execute_in_process(raise_on_error=False)
        failed = {
            event.step_key: event.step_failure_data.error.cause.message for event in run.get_step_failure_events()
        }
        assert failed
        for message in failed.values():
            check_error(message, code, *values)
    [sensor] = [each for each in found.sensors if each.name == f"{prefix}_data_sensor"]
    with pytest.raises(UsageError) as caught:
        sensor(dg.build_sensor_context())
    check_error(caught.value, code, *values)
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING


def assets_of(recipes: set[str]) -> set[str]:
    return {f"{recipe}/{asset}" for recipe in recipes for asset in GRAPH}


@pytest.mark.parametrize("variable", ["PEDIGREE_RECIPES", "PEDIGREE_ONLY_RECIPES"])
def test_recipes_are_shown_beside_those_of_the_project_or_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
):
    """A recipe that is shown alone may have the name of one of the project's recipes, or be one of them."""
    of_project = {"demo"} if variable == "PEDIGREE_RECIPES" else set()
    for name in ("folder/one", "folder/two", "three", "four", "other/demo"):
        write_recipe(tmp_path / name, ATTRIBUTES)
    monkeypatch.setenv("PEDIGREE_RECIPES", str(tmp_path / "four"))
    monkeypatch.setenv(variable, f"{tmp_path / 'folder'}:{tmp_path / 'three'}")
    assert shown_assets() == assets_of({"one", "two", "three", *of_project})
    monkeypatch.setenv(variable, str(DEFS / "demo"))
    assert shown_assets() == assets_of({"demo"})
    monkeypatch.setenv("PEDIGREE_ONLY_RECIPES", str(tmp_path / "other" / "demo"))
    [alone] = extra_recipes()
    assert (alone.folder, alone.name, alone.fault) == (tmp_path / "other" / "demo", "demo", None)


def shown_assets() -> set[str]:
    return {key.to_user_string() for key in defs().resolve_asset_graph().get_all_asset_keys()}


def test_missing_recipe_is_reported_with_the_list_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PEDIGREE_ONLY_RECIPES", str(tmp_path / "gone"))
    assert_fails_alone("gone", "unknown-recipe", ["PEDIGREE_ONLY_RECIPES: ", f"'{tmp_path}/gone'"], set())


def test_invalid_recipe_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its assets, runs and sensors keep their names, and each of them fails with the error."""
    write_recipe(tmp_path / "right", ATTRIBUTES)
    write_recipe(tmp_path / "not-right", {**ATTRIBUTES, "training": {"epoch": 3}})
    monkeypatch.setenv("PEDIGREE_RECIPES", str(tmp_path))
    values = ["not-right/defs.yaml:12: training.epoch: ", "`epochs`"]
    assert_fails_alone("not-right", "unknown-field", values, {"demo", "right"})


def test_missing_recipes_and_recipes_of_one_name_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty folder stands for the recipes that were in it. Two recipes of one name are ambiguous."""
    places = [tmp_path / name for name in ("first", "second", "gone")]
    for folder in (places[0] / "right", places[0] / "one-name", places[1] / "one_name"):
        write_recipe(folder, ATTRIBUTES)
    monkeypatch.setenv("PEDIGREE_RECIPES", ":".join(map(str, places)))
    others = {"demo", "right", "one-name", "gone"}
    values = ["PEDIGREE_RECIPES: ", f"'{places[2]}'", "(demo)", "defs.yaml"]
    assert_fails_alone("gone", "unknown-recipe", values, others - {"gone"})
    values = ["one_name", f"{places[0]}/one-name", f"{places[1]}/one_name"]
    assert_fails_alone("one-name", "duplicate-name", values, others - {"one-name"})


def test_a_recipe_whose_variant_has_the_name_of_another_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Dagster would silently show one of the two, and the other would never be materialized."""
    hot = {"variants": {"hot": {"training": {"loss": {"beta": 0.5}}}}}
    write_recipe(tmp_path / "first" / "mine", ATTRIBUTES | hot)
    write_recipe(tmp_path / "second" / "mine-hot", ATTRIBUTES)
    monkeypatch.setenv("PEDIGREE_RECIPES", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    values = ["mine-hot", f"{tmp_path}/second/mine-hot", f"{tmp_path}/first/mine"]
    assert_fails_alone("mine", "duplicate-name", values, {"demo", "mine-hot"})


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("right.bak", "wrong-folder-name", ["'right.bak'", "_ and -"]),
        ("demo", "duplicate-name", [f"{DEFS}/demo", "recipes/demo"]),
    ],
)
def test_a_recipe_that_cannot_have_its_name_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, values: list[str]
):
    """A copy beside a recipe is enough: two names of one key, or a name that Dagster refuses, would stop all recipes."""
    for folder in ("right", name):
        write_recipe(tmp_path / "recipes" / folder, ATTRIBUTES)
    monkeypatch.setenv("PEDIGREE_RECIPES", str(tmp_path / "recipes"))
    [spare] = [extra.name for extra in extra_recipes() if extra.folder.name == name]
    assert re.fullmatch(f"{name.replace('.', '_')}_[0-9a-f]{{12}}", spare)
    assert_fails_alone(spare, code, values, {"demo", "right"})


def test_missing_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PEDIGREE_RECIPES", str(tmp_path / "recipes.d"))
    [extra] = extra_recipes()
    assert_fails_alone(extra.name, "unknown-recipe", ["PEDIGREE_RECIPES: ", f"'{tmp_path}/recipes.d'"], {"demo"})


@pytest.mark.parametrize("content", ["", None])
def test_a_recipe_above_others_does_not_hide_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None):
    """A file that was saved a level too high, valid or empty."""
    above = tmp_path / "recipes"
    for folder in (above / "right", above):
        write_recipe(folder, ATTRIBUTES)
    if content is not None:
        (above / "defs.yaml").write_text(content)
    monkeypatch.setenv("PEDIGREE_RECIPES", str(above))
    assert_fails_alone("recipes", "nested-recipes", [str(above), "(right)", "defs.yaml"], {"demo", "right"})
    assert recipe_place(str(above)) == above


ODD = r"""
type: workflows.PreferenceTuning
attributes:
  data: {sources: [{path: a.jsonl}]}
  reference: {model: ./b}
  release: {model_name: x}
  tokenization: {template_kwargs: {system: "Be nice"}}
"""


# Nine times as many values on each line. The sixth line is the first with more than 100,000.
NINES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        (ODD.replace("Be nice", r"\ud83d\ude00"), "lone-surrogate", r"defs.yaml:7: \ud83d "),
        (ODD.replace("workflows.PreferenceTuning", r'"\ud83d"'), "not-one-recipe", r"\ud83d"),
        ("[" * 1000, "nested-too-deep", "defs.yaml: "),
        (f"{ODD}a: &a [*a]\n", "too-many-values", f"defs.yaml:{ODD.count(chr(10)) + 1}: "),
        (f"{ODD}{NINES}", "too-many-values", f"defs.yaml:{ODD.count(chr(10)) + 6}: "),
        (
            ODD + "  variants: {hot: {training: {seed: !!timestamp foo}}}",
            "wrong-yaml-tag",
            "defs.yaml:8: YAML cannot read `foo`",
        ),
        (ODD.replace('"Be nice"', "!!binary /////w=="), "recipe", "defs.yaml: "),
    ],
    ids=["lone surrogate", "its type", "deep", "endless", "billions", "invalid time", "bytes"],
)
def test_invalid_content_of_a_file_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, code: str, value: str
):
    """The error is text that a page can show."""
    write_recipe(tmp_path / "right", ATTRIBUTES)
    write_recipe(tmp_path / "odd", ATTRIBUTES)
    (tmp_path / "odd" / "defs.yaml").write_text(content)
    monkeypatch.setenv("PEDIGREE_RECIPES", str(tmp_path))
    assert_fails_alone("odd", code, [value], {"demo", "right"})


def test_folder_whose_name_is_not_text_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_recipe(tmp_path / "right", ATTRIBUTES)
    write_recipe(tmp_path / os.fsdecode(b"caf\xe9"), ATTRIBUTES)
    monkeypatch.setenv("PEDIGREE_RECIPES", str(tmp_path))
    [spare] = {extra.name for extra in extra_recipes()} - {"right"}
    assert_fails_alone(spare, "undecodable-path", [r"caf\xe9", "utf-8"], {"demo", "right"})


def test_unreadable_folder_is_reported_and_hides_no_other():
    with without_privileges() as folder:
        private, place = folder / "private", folder / "recipes"
        write_recipe(private / "mine", ATTRIBUTES)
        for number in range(5):
            write_recipe(place / f"r{number}", ATTRIBUTES)
            (place / f"x{number}").symlink_to(private / "mine")
        (place / "gone").symlink_to(place / "nowhere")
        (place / "loop").symlink_to(place / "loop")
        private.chmod(0)
        found = recipe_folders(str(place))
        assert all(found.pop(place / f"r{number}") is None for number in range(5))
        [(hidden, fault)] = found.items()
        assert hidden == private / "mine"
        check_error(fault, "unreadable-folder", place / "x", "Permission denied")
        with pytest.raises(UsageError, match=r"private/mine: .*Permission denied.*\[unreadable-folder\]"):
            recipe_folders(str(private / "mine"))
        private.chmod(0o755)


@pytest.mark.parametrize(("name", "code"), [("loop", "unknown-recipe"), ("n" * 300, "unreadable-folder")])
def test_listed_path_with_a_system_error_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str
):
    write_recipe(tmp_path / "recipes" / "right", ATTRIBUTES)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("PEDIGREE_RECIPES", f"{tmp_path / name}:{tmp_path / 'recipes'}")
    assert_fails_alone(name, code, ["PEDIGREE_RECIPES: ", name], {"demo", "right"})


def test_variants_of_an_edited_file_are_the_current_ones(tmp_path: Path):
    """A file is cached by its time and size."""
    file = write_recipe(tmp_path / "small", {**ATTRIBUTES, "variants": {"hot": {}}}) / "defs.yaml"
    assert variant_names(file) == ("hot",)
    file.write_text(file.read_text().replace("hot", "hotter"))
    assert variant_names(file) == ("hotter",)
    shutil.rmtree(tmp_path / "small")
    assert variant_names(file) == ()


def test_path_with_a_colon_is_not_split(tmp_path: Path):
    write_recipe(tmp_path / "a:b" / "small", ATTRIBUTES)
    done = CliRunner().invoke(main, ["ui", str(tmp_path / "a:b")], env={"PEDIGREE_ONLY_RECIPES": ""})
    assert done.exit_code == 2
    check_error(done.stderr, "unsupported-path", "a:b", "':'")


def test_a_recipe_whose_folders_may_be_entered_and_not_listed_is_one():
    """As home folders of other users often are."""
    load_recipes(DEFS / "demo")  # import before the switch to a user who may not read these modules
    with without_privileges() as folder:
        place = write_recipe(folder / "home" / "small", {**ATTRIBUTES, "variants": {"hot": {"training": {"seed": 1}}}})
        for closed in (place, place.parent):
            closed.chmod(0o111)
        assert recipe_folders(str(place)) == {place: None}
        assert [loaded.pipeline.name for loaded in load_recipes(place)] == ["small", "small-hot"]
        for closed in (place.parent, place):
            closed.chmod(0o755)
