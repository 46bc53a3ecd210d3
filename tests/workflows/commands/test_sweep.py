"""A recipe with two variants, run and compared: shared work is computed once, and each has its own policy."""

import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest
from mlflow import MlflowClient

import model_registry.files
from assets.pipeline.graph import GRAPH
from model_registry.gate.scores import GateMetric
from model_registry.package_model import package
from model_registry.registry import Registry
from tests.factories import write_inputs
from tests.workflows import edits
from tests.workflows.homes import check_error, check_values, latest, write_recipe
from tests.workflows.in_process import Baseline, services_in
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import UsageError, without_code
from training.contract.identity.fingerprint import short
from workflows.commands.compare import Comparison, compare, last_evaluated
from workflows.commands.gc import collect
from workflows.commands.inspect_pair import inspect_row
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe, load_recipes
from workflows.state.status import status

pytestmark = pytest.mark.slow

SWEEP: dict[str, Any] = {
    **PLAIN,
    "data": {"sources": [{**PLAIN["data"]["sources"][0], "name": "sums"}], "validation_fraction": 0.5},
    "variants": {
        "hinge": {"training": {"loss": {"type": "hinge"}, "optimizer": {"learning_rate": 1e-2}}},
        "fewer-samples": {"evaluation": {"samples": 0}},
    },
}
NAMES = ["sweep", "sweep-hinge", "sweep-fewer-samples"]
WRONG, WRONG_OVER_CHAMPIONS = GateMetric.ERROR_RATE, GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """Run the recipe, plan and run the first variant, then run the second."""
    place = tmp_path_factory.mktemp("sweep")
    (home := place / "home").mkdir()
    folder = place / "recipes" / "sweep"
    write_inputs(write_recipe(folder, SWEEP))
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setattr(model_registry.files, "_package", package)  # in this process instead of one of its own
        yield Baseline(home, services_in(home), instance, {"sweep": folder})


@pytest.fixture(scope="module")
def planned(baseline: Baseline) -> dict[str, Any]:
    """Return the plan of the variant after the recipe's run."""
    baseline.run_once("sweep")
    pipeline = load_recipe(baseline.folders["sweep"], "hinge").pipeline
    return {asset.asset: asset for asset in plan(pipeline, baseline.services, baseline.instance)}


@pytest.fixture(scope="module")
def reports(baseline: Baseline, planned: dict[str, Any]) -> list[RunReport]:
    variants = [load_recipe(baseline.folders["sweep"], name) for name in SWEEP["variants"]]
    return [materialize(loaded, baseline.services, baseline.instance) for loaded in variants]


@pytest.fixture
def comparison(baseline: Baseline, reports: list[RunReport]) -> Comparison:
    loaded = load_recipes(baseline.folders["sweep"])
    return compare([last_evaluated(each.pipeline, baseline.services, baseline.instance) for each in loaded])


def test_a_variant_has_to_score_nothing(planned: dict[str, Any]):
    assert planned["reference_logprobs"].work["missing"] == 0
    own = {"prequential_scores", "policy", "evaluation", "released_model"}
    assert {name for name, a in planned.items() if a.action == "compute"} == own
    assert planned["prequential_scores"].work == {"pairs": 0, "policies": 0}


def test_what_a_variant_shares_is_reused(reports: list[RunReport]):
    """The planned variant's specs exist already: a plan makes cheap artifacts. Arriving pairs belong to a recipe."""
    assert all(report.succeeded for report in reports)
    computed = [{a.asset for a in report.assets if a.outcome == "computed"} for report in reports]
    made = {"prequential_scores", "evaluation", "released_model"}
    assert computed == [made | {"policy"}, made | {"evaluation_spec"}]


def test_every_pipeline_is_fresh_verified_and_referenced(baseline: Baseline, reports: list[RunReport]):
    for loaded in load_recipes(baseline.folders["sweep"]):
        found = status(loaded.pipeline, baseline.services, baseline.instance)
        assert {asset.state for asset in found} == {"fresh"} and len(found) == len(GRAPH)
        assert verify(loaded.pipeline, baseline.services, baseline.instance, rows=0).ok
        assert inspect_row(loaded.pipeline, baseline.services, baseline.instance, 0).row == 0
    unused = collect(baseline.services, baseline.instance).garbage
    assert {item.kind for item in unused} <= {"job"}


def test_runs_of_variants_are_in_one_experiment_with_different_names(baseline: Baseline, reports: list[RunReport]):
    """The variant with other samples has the policy, and so the MLflow run, of the recipe itself."""
    client = MlflowClient(baseline.services.tracker.tracking_uri)
    experiment = client.get_experiment_by_name("sweep")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name.rpartition(" ")[0] for run in runs} == {"sweep", "sweep-hinge"}
    losses = {run.info.run_name.rpartition(" ")[0]: run.data.params["training.loss.type"] for run in runs}
    assert losses == {"sweep": "sigmoid", "sweep-hinge": "hinge"}
    assert all("variants" not in name for run in runs for name in run.data.params)


def test_an_experiment_leaves_the_champion_alone(baseline: Baseline, reports: list[RunReport]):
    name = PLAIN["release"]["model_name"]
    champions = {n: baseline.services.registry.champion(n) for n in (name, f"{name}-hinge", f"{name}-fewer-samples")}
    assert {n: found and found.number for n, found in champions.items()} == dict.fromkeys(champions, 1)


def test_comparison_has_settings_and_results(comparison: Comparison):
    assert comparison.against == "sweep" and [each.recipe for each in comparison.recipes] == NAMES
    own, hinge, same = comparison.recipes
    assert hinge.settings["training.loss.type"] == "hinge" and own.settings["training.loss.type"] == "sigmoid"
    assert set(own.settings) <= {
        "training.loss.type",
        "training.loss.label_smoothing",
        "training.optimizer.learning_rate",
        "evaluation.samples",
    }
    assert own.pairs == hinge.pairs >= 10
    assert "loss" not in hinge.means and hinge.differences["margin"].mean != 0
    assert same.means == own.means
    assert {d.mean for d in same.differences.values()} == {d.standard_error for d in same.differences.values()} == {0.0}
    assert not any(each.notes for each in comparison.recipes)


def test_a_comparison_on_the_pairs_of_one_source(baseline: Baseline, comparison: Comparison):
    def on(source: str) -> Comparison:
        loaded = load_recipes(baseline.folders["sweep"])
        return compare([last_evaluated(each.pipeline, baseline.services, baseline.instance, source) for each in loaded])

    assert on("sums") == comparison, "all have that source"
    with pytest.raises(UsageError, match=r"\[unknown-source-name\]$") as caught:
        on("poems")
    lines = without_code(str(caught.value)).splitlines()
    assert [line.partition(": ")[0] for line in lines] == NAMES
    assert all("`poems` (names: sums)" in line for line in lines)


def test_the_accuracy_is_that_of_the_evaluation(baseline: Baseline, comparison: Comparison):
    for each in comparison.recipes:
        key = dg.AssetKey([each.recipe, "evaluation"])
        event = baseline.instance.get_latest_materialization_event(key)
        metrics = event.asset_materialization.metadata
        assert each.means["accuracy"] == pytest.approx(metrics["eval/rewards/accuracies"].value, rel=1e-3)
        beta = 0.1
        assert beta * each.means["margin"] == pytest.approx(metrics["eval/rewards/margins"].value, rel=1e-3)


def test_comparison_does_not_query_the_registry(baseline: Baseline, reports: list[RunReport]):
    """Each recipe would wait for a dead registry's answer, and needs none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = Registry(f"http://127.0.0.1:{server.getsockname()[1]}", baseline.home / "mlflow" / "downloads")
        services = replace(baseline.services, registry=silent)
        for loaded in load_recipes(baseline.folders["sweep"]):
            assert last_evaluated(loaded.pipeline, services, baseline.instance).notes == ()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_an_edited_variant_is_compared_as_it_was_evaluated(baseline: Baseline, reports: list[RunReport]):
    folder = baseline.folders["sweep"]
    before = (folder / "defs.yaml").read_text()
    try:
        edited = {**SWEEP, "variants": {"hinge": {"training": {"loss": {"type": "ipo"}}}}}
        write_recipe(folder, json.loads(json.dumps(edited)))
        pipeline = load_recipe(folder, "hinge").pipeline
        found = last_evaluated(pipeline, baseline.services, baseline.instance)
    finally:
        (folder / "defs.yaml").write_text(before)
    assert found.settings["training.loss.type"] == "hinge"
    [note] = found.notes
    assert "training_spec: loss.type hinge -> ipo" in note


def test_missing_evaluation_is_noted_and_the_others_are_compared(baseline: Baseline, reports: list[RunReport]):
    evaluation = dg.AssetKey(["sweep-hinge", "evaluation"])
    folder = baseline.services.store.folder("evaluation", str(latest(baseline.instance, evaluation).fingerprint))
    folder.rename(folder.with_suffix(".lost"))
    try:
        loaded = load_recipes(baseline.folders["sweep"])
        found = compare([last_evaluated(each.pipeline, baseline.services, baseline.instance) for each in loaded])
    finally:
        folder.with_suffix(".lost").rename(folder)
    own, hinge, same = found.recipes
    assert own.means and same.differences and not hinge.means
    [note] = hinge.notes
    check_error(note, "no-artifact", f" evaluation {short(folder.name)} ")


@pytest.mark.parametrize(
    ("edit", "compared"),
    [
        (edits.field("evaluation.max_new_tokens", 3), r"on \d+ shared pairs the loss .*the same as the champion's"),
        (edits.field("training.loss.beta", 0.2), rf".* another loss .*; on \d+ shared pairs .*{WRONG}"),
        (edits.template(edits.space_after_roles), rf".* template.*; on 1[0-9] shared pairs .*{WRONG}"),
        (
            edits.both(edits.template(edits.space_after("opposite")), edits.data_lines(lambda rows: rows[1:])),
            rf".* template.*; on 1[0-9] shared pairs .*{WRONG}",
        ),
        (edits.config("rms_norm_eps", 1e-1), rf".* another reference.*; on \d+ shared pairs .*{WRONG_OVER_CHAMPIONS}"),
    ],
    ids=[
        *("longer samples", "another beta", "another template"),
        *("another template for most, and other row numbers", "another base model"),
    ],
)
def test_gate_compares_losses_of_one_scale_only(
    baseline: Baseline, reports: list[RunReport], tmp_path, monkeypatch, edit: edits.Edit, compared: str
):
    """The gate is `ladder`: its decision names the compared pairs.

    Longer samples change no loss of a pair. Another beta is another scale, so wrongly ranked pairs are counted.

    In another template no pair keeps its tokens, or too few do, but messages still identify the pair.
    So all held-out pairs are compared in each case, and the error rate is one minus the evaluation's accuracy. After a
    change of the base model both are measured over the champion's reference.
    """
    name = PLAIN["release"]["model_name"]
    champion = baseline.services.registry.champion(name)
    folder = Path(shutil.copytree(baseline.folders["sweep"], tmp_path / "sweep"))
    ladder = edits.field("release.gate", {"type": "ladder"})
    edits.both(edit, ladder)(edits.Sandbox(folder, baseline.home, monkeypatch))
    loaded = load_recipe(folder)
    try:
        assert materialize(loaded, baseline.services, baseline.instance).succeeded
        released, evaluated = (
            latest(baseline.instance, loaded.pipeline.key(asset)).metadata for asset in ("released_model", "evaluation")
        )
    finally:
        baseline.restore("sweep")
    assert released["shared_pairs"] == evaluated["eval/pairs"]
    if WRONG in compared:
        assert released["candidate_error_rate"] == pytest.approx(1 - evaluated["eval/rewards/accuracies"])
    if WRONG_OVER_CHAMPIONS in compared:
        candidate_pairs, champion_pairs = (
            pd.read_parquet(baseline.services.store.folder("evaluation", fingerprint) / "pairs.parquet").set_index(
                "row"
            )
            for fingerprint in (evaluated["fingerprint"], champion.fingerprint_of("evaluation"))
        )
        for name_of_policy, policy in (("candidate", candidate_pairs), ("champion", champion_pairs)):
            chosen, rejected = (
                policy[f"policy_{side}_logprob"] - champion_pairs[f"reference_{side}_logprob"]
                for side in ("chosen", "rejected")
            )
            rate = released[f"{name_of_policy}_error_rate_over_champions_reference"]
            assert rate == pytest.approx((chosen <= rejected).mean(), rel=1e-3), name_of_policy
        shift = candidate_pairs["reference_chosen_logprob"] - champion_pairs["reference_chosen_logprob"]
        assert shift.abs().min() > 1e-3
    versions = [v for v in baseline.services.registry.versions() if v.name == name]
    assert re.match(compared, max(versions, key=lambda version: version.number).tags["pedigree.reasons"])


def test_loss_without_a_reference_is_measured_over_the_recipes_reference(baseline: Baseline, comparison: Comparison):
    folder = baseline.folders["sweep"]
    before = (folder / "defs.yaml").read_text()
    try:
        write_recipe(folder, {**SWEEP, "variants": {"cpo": {"training": {"loss": {"type": "cpo"}}}}})
        assert materialize(load_recipe(folder, "cpo"), baseline.services, baseline.instance).succeeded
        loaded = load_recipes(folder)
        found = compare([last_evaluated(each.pipeline, baseline.services, baseline.instance) for each in loaded])
    finally:
        (folder / "defs.yaml").write_text(before)
    own, other = found.recipes
    assert own.means == comparison.recipes[0].means and not own.notes
    [note] = other.notes
    check_values(note, "no reference", "accuracy", "margin", "recipe")
    assert set(other.means) == set(other.differences) == {"accuracy", "margin"}
