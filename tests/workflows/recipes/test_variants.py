"""A recipe with variants as pipelines side by side: names, graph, errors, and lookup."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import yaml

from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Services
from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, Home, check_error, check_values, write_recipe
from tests.workflows.in_process import services_in
from training.contract.config.recipe import Recipe
from training.contract.errors import RecipeError, UsageError
from workflows.cli import progress
from workflows.orchestration.resources import services
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import find_recipes, load_recipe, load_recipes, recipe_folder

VARIANTS = {"hinge": {"training": {"loss": {"type": "hinge"}}}, "beta-0p5": {"training": {"loss": {"beta": 0.5}}}}
SWEEP = {**ATTRIBUTES, "variants": VARIANTS}


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_recipe(tmp_path / "sweep", SWEEP)


def test_recipe_comes_first_and_is_unchanged(folder):
    pipelines = [loaded.pipeline for loaded in load_recipes(folder)]
    assert [pipeline.name for pipeline in pipelines] == ["sweep", "sweep-hinge", "sweep-beta-0p5"]
    assert [pipeline.argument for pipeline in pipelines] == [
        f"{folder}{variant}" for variant in ("", "/hinge", "/beta-0p5")
    ]
    assert [find_recipes(pipeline.argument)[0].pipeline for pipeline in pipelines] == pipelines
    assert find_recipes("demo")[0].pipeline.argument == "demo"
    assert pipelines[0].recipe == Recipe.model_validate(ATTRIBUTES).located_at(folder)
    assert {type(pipeline.recipe) for pipeline in pipelines} == {Recipe}
    assert {pipeline.recipe.reference.model for pipeline in pipelines} == {str(folder / "base")}


def test_the_shipped_recipe_is_resolved_as_it_was():
    attributes = yaml.safe_load((DEFS / "demo" / "defs.yaml").read_text())["attributes"]
    assert load_recipe(DEFS / "demo").pipeline.recipe == Recipe.model_validate(attributes).located_at(DEFS / "demo")


def test_each_variant_is_a_pipeline_that_nothing_starts_by_itself(folder):
    merged = dg.Definitions.merge(
        *(loaded.definitions for loaded in load_recipes(folder)), dg.Definitions(resources={"services": services})
    )
    graph = merged.resolve_asset_graph()
    names = ["sweep", "sweep-hinge", "sweep-beta-0p5"]
    assert {tuple(key.path) for key in graph.get_all_asset_keys()} == {(name, a) for name in names for a in GRAPH}
    assert [schedule.name for schedule in merged.schedules or []] == ["sweep_schedule"]
    status_sensors = {"sweep_hinge_status_sensor", "sweep_beta_0p5_status_sensor"}
    # These only follow jobs in a queue, which a run has started.
    followers = {f"{name}_detached_jobs_sensor" for name in ("sweep", "sweep_hinge", "sweep_beta_0p5")}
    assert {sensor.name for sensor in merged.sensors or []} == {
        "sweep_data_sensor",
        "sweep_automation",
        *status_sensors,
        *followers,
    }
    conditions = {k.path[0] for k in graph.get_all_asset_keys() if graph.get(k).automation_condition is not None}
    assert conditions == {"sweep"}


def test_only_what_reads_the_changed_fields_has_another_code_version(folder):
    """The loss is read by the two specs and nothing above them.

    The release and the scores of arriving pairs differ by the model's name.
    """
    own, *others = (loaded.pipeline.recipe for loaded in load_recipes(folder))
    for other in others:
        differing = {a for a, node in GRAPH.items() if node.code_version(own) != node.code_version(other)}
        assert differing == {"training_spec", "evaluation_spec", "prequential_scores", "released_model"}


MINIMAL = "data: {sources: [{path: a.jsonl}]}, reference: {model: ./b}, release: {model_name: x}"


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (
            "{hinge:\n  {training: {loss: {typ: hinge}}}}",
            r"4: variants.hinge.training.loss.typ: .*`type`.*\[unknown-field\]",
        ),
        (
            "{a: {evaluation: {zzz: 3}}}",
            r"3: variants.a.evaluation.zzz: .* samples, max_new_tokens.*\[unknown-field\]",
        ),
        ("{a: {training: {batch_size: -4}}}", r"variants.a.training.batch_size: .* -4 \[invalid-value\]"),
        (
            "{a: {training: {loss: {type: hinge, tau: 1}}}}",
            r"3: variants.a.training.loss.tau: `tau` .* hinge; .*`null` .*\[invalid-value\]",
        ),
        ("{a: {variants: {b: {}}}}", r"3: variants.a.variants: .* data, .*, automation \[unknown-field\]$"),
        ("{a: {},\n   a: {}}", r"`a` .*3 and 4.*\[duplicate-field\]"),
        ("{a_b: {}, a-b: {}}", r"variants.a-b: .* wrong-a-b, .* variant a_b .*\[duplicate-name\]"),
        ("{next: {}}", r"variants.next: .* wrong-next, .* recipe wrong_next .*\[duplicate-name\]"),
        ("{next-x: {}}", r" wrong-next-x, .* variant x of .*wrong_next .*\[duplicate-name\]"),
        ("{a: {automation: {cron: daily}}}", r"3: variants.a.automation.cron: daily: .*\[wrong-schedule\]"),
    ],
)
def test_problem_of_a_variant_is_reported_with_its_location(tmp_path, variants, message):
    write_recipe(tmp_path / "wrong_next", {**ATTRIBUTES, "variants": {"x": {}}})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "defs.yaml").write_text("attributes: [")
    (tmp_path / "wrong").mkdir()
    file = tmp_path / "wrong" / "defs.yaml"
    file.write_text(f"type: workflows.PreferenceTuning\nattributes:\n  {{{MINIMAL}, variants: {variants}}}\n")
    with pytest.raises(RecipeError, match=message) as error:
        load_recipes(tmp_path / "wrong")
    text = str(error.value)
    assert text.startswith(str(file)) and text.count("defs.yaml") == len(text.splitlines()) == 1


def test_a_variant_is_found_behind_its_recipe(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for text in (f"{folder}/hinge", "sweep/hinge", "./sweep/hinge/"):
        assert [loaded.pipeline.name for loaded in find_recipes(text)] == ["sweep-hinge"]
    assert [loaded.pipeline.variant for loaded in find_recipes("sweep")] == [None, "hinge", "beta-0p5"]
    for text in ("sweep", f"{folder}/defs.yaml", "sweep/defs.yaml"):
        assert find_recipes(text)[0].pipeline.name == "sweep"
    assert find_recipes("demo")[0].pipeline.name == "demo" and recipe_folder("demo") == DEFS / "demo"
    with pytest.raises(UsageError, match=r" sweep .*'hing'.* hinge, beta-0p5 \[unknown-variant\]"):
        find_recipes("sweep/hing")[0]
    with pytest.raises(UsageError, match=r" demo .*'x'.* none \[unknown-variant\]"):
        find_recipes("demo/x")[0]
    with pytest.raises(UsageError, match=r"'nowhere/x' .*\[unknown-recipe\]"):
        find_recipes("nowhere/x")[0]


def test_a_path_with_a_dot_is_the_folder_here(tmp_path, monkeypatch):
    """The project has a recipe of that name as well."""
    write_recipe(tmp_path / "demo", SWEEP)
    monkeypatch.chdir(tmp_path)
    assert recipe_folder("demo") == DEFS / "demo"
    assert recipe_folder("./demo") == tmp_path / "demo"
    assert find_recipes("./demo/hinge")[0].pipeline.recipe.reference.model == str(tmp_path / "demo" / "base")


@pytest.fixture(scope="module")
def home(new_home) -> Home:
    return new_home()


def test_failed_recipe_does_not_stop_the_others(home, tmp_path):
    variants = {"there": {"data": {"sources": [{"path": "there.jsonl"}]}}}
    folder = write_recipe(tmp_path / "sweep", {**ATTRIBUTES, "variants": variants})
    (folder / "there.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    done = home.invoke("run", str(folder), "--variants", "--select", "preference_source", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["recipe"] == "sweep"
    outcomes = [(run["recipe"], [(a["asset"], a["outcome"]) for a in run["assets"]]) for run in found["runs"]]
    assert outcomes == [
        ("sweep", [("preference_source", "failed")]),
        ("sweep-there", [("preference_source", "computed")]),
    ]
    check_values(done.stderr, "2 of 2 ", "1 failed", ": sweep")


def test_compared_recipes_need_different_names(home, folder):
    """They would be one pipeline with the same asset keys, so the same evaluation twice."""
    done = home.invoke("compare", str(folder), f"{folder}/hinge", str(folder), f"{folder}/hinge", f"{folder}/hinge/")
    assert done.exit_code == 2
    check_error(done.stderr, "duplicate-recipe", " 3 ", " sweep-hinge")


class _CtrlC:
    """An engine that raises Ctrl-C's interrupt instead of starting a job."""

    def find(self, *_: object) -> None:
        return None

    def submit(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


def test_ctrl_c_stops_all_recipes(home, tmp_path, monkeypatch):
    def interrupted(path: Path, *_: object) -> Services:
        return replace(services_in(path), engine=_CtrlC())

    folder = write_recipe(tmp_path / "sweep", SWEEP)
    write_inputs(folder)
    monkeypatch.setattr(progress, "build_services", interrupted)
    done = home.invoke("run", str(folder), "--variants", "--select", "raw_preferences")
    assert done.exit_code == 1
    check_values(done.stderr, "1 of 3 ", "1 failed", ": sweep")
    assert "interrupted" in done.stdout
