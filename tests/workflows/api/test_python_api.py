"""`import pedigree`: its answers are those of the command and of the libraries that read the files."""

import asyncio
import io
import json
import subprocess
import sys
import threading
import warnings
from dataclasses import asdict
from pathlib import Path

import mlflow.transformers
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow import MlflowClient
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pedigree
from tests.workflows.homes import ATTRIBUTES, PAIRS, ROOT, Home, check_error, edit, write_recipe

pytestmark = pytest.mark.slow


def folder_of(materialized, asset):
    home, report = materialized
    [fingerprint] = [made["fingerprint"] for made in report["assets"] if made["asset"] == asset]
    return home.path / "store" / asset / fingerprint


def as_json(found):
    return json.loads(json.dumps([asdict(asset) for asset in found]))


def test_import_is_light_and_lists_the_interface():
    source = (
        "import json, pedigree, sys\n"
        "heavy = {'dagster', 'mlflow', 'numpy', 'pyarrow', 'pydantic', 'rich', 'torch', 'transformers'}\n"
        "names = dir(pedigree)\n"
        "print(json.dumps([sorted(heavy & sys.modules.keys()), names]))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    imported, names = json.loads(done.stdout)
    assert imported == []
    assert names == sorted(pedigree.__all__) and all(getattr(pedigree, name).__name__ == name for name in names)


def test_unknown_name_of_the_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="load_recipee"):
        pedigree.load_recipee  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("asset", "file"), [("raw_preferences", "preferences.parquet"), ("evaluation", "pairs.parquet")]
)
def test_table_in_parquet_is_that_of_pyarrow(materialized, recipe, asset, file):
    table = recipe.table(asset)
    assert table.equals(pq.read_table(folder_of(materialized, asset) / file))
    assert len(table.to_pandas()) == len(table) > 0


def test_table_of_tokenized_pairs_is_that_of_arrow(materialized, recipe):
    with pa.ipc.open_stream((folder_of(materialized, "tokenized_pairs") / "pairs.arrow").read_bytes()) as stream:
        assert recipe.table("tokenized_pairs").equals(stream.read_all())


def test_table_of_logprobs_has_the_tensors_beside_the_rows_of_the_pairs(materialized, recipe):
    table = recipe.table("reference_logprobs").to_pandas()
    tensors = load_file(folder_of(materialized, "reference_logprobs") / "logprobs.safetensors")
    assert len(table) == PAIRS and set(table.columns) == {"row", "split", *tensors}
    assert all((table[name].to_numpy() == column).all() for name, column in tensors.items())
    scored = recipe.table("evaluation").to_pandas().merge(table, on="row")
    assert (scored["reference_chosen_logprob"] == scored["chosen_logprobs"]).all() and len(scored) > 0
    assert set(scored["split"]) == {"validation"}


def test_metrics_and_artifact_are_those_of_the_report(materialized, recipe):
    artifact, folder = recipe.artifact("policy"), folder_of(materialized, "policy")
    assert recipe.metrics() == materialized[1]["metrics"] != {}
    assert (artifact.folder, artifact.fingerprint) == (folder, folder.name)
    assert artifact.manifest.files.keys() == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    } - {"manifest.json"}


def test_training_history_is_that_in_mlflow(materialized, recipe):
    home, report = materialized
    client = MlflowClient(f"sqlite:///{home.path}/mlflow/mlflow.db")
    history = recipe.training_history().to_pandas()
    assert history["step"].tolist() == list(range(1, 13))
    for name in ("loss", "rewards/margins", "rewards/accuracies"):
        points = sorted(client.get_metric_history(report["mlflow_run_id"], name), key=lambda point: point.step)
        assert history[name].tolist() == [point.value for point in points]


def test_status_and_plan_are_those_of_the_command(checkout):
    edit(checkout, {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}})
    recipe, home = pedigree.load_recipe(checkout.folder, home=checkout.home), Home(checkout.home)
    status, planned = recipe.status(), recipe.plan()
    assert as_json(status) == home.query("status", str(checkout.folder))["assets"]
    assert as_json(planned) == home.query("plan", str(checkout.folder))["assets"]
    [policy] = [asset for asset in planned if asset.asset == "policy"]
    assert (policy.action, policy.causes) == ("compute", ("training_spec: loss.beta 0.1 -> 0.2",))
    assert {asset.asset: asset.state for asset in status}["policy"] == "stale"


def test_champion_gives_the_logits_of_the_model_at_mlflows_address(materialized, recipe, monkeypatch):
    uri = f"sqlite:///{materialized[0].path}/mlflow/mlflow.db"
    champion, client = recipe.champion(), MlflowClient(uri)
    recorded = client.get_model_version_by_alias("small", "champion")
    assert (champion.number, champion.tags) == (int(recorded.version), dict(recorded.tags))
    assert champion.reasons == materialized[1]["reasons"]
    assert champion.weights == folder_of(materialized, "policy").name == champion.tags["pedigree.policy"]
    assert recipe.versions() == [champion] and champion.uri == "models:/small/1"
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", uri
    )  # not mlflow.set_tracking_uri, which lasts for all tests of the process
    expected = mlflow.transformers.load_model("models:/small@champion", return_type="components")
    question = [{"role": "user", "content": "What is the capital of Peru?"}]
    ids = [
        tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        for tokenizer in (AutoTokenizer.from_pretrained(champion.folder()), expected["tokenizer"])
    ]
    assert torch.equal(ids[0]["input_ids"], ids[1]["input_ids"])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(champion.folder())(**ids[0]).logits
        assert torch.equal(logits, expected["model"](**ids[1]).logits)


def test_run_works_in_an_event_loop_and_in_a_thread_without_a_real_stdout(checkout, monkeypatch):
    """As in a notebook. The command then reuses everything."""
    edit(checkout, {**ATTRIBUTES, "evaluation": {**ATTRIBUTES["evaluation"], "samples": 3}})
    recipe = pedigree.load_recipe(checkout.folder, home=checkout.home)
    reports = []

    async def cell():
        reports.append(recipe.run("evaluation"))
        return asyncio.get_running_loop()

    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "stdout", io.StringIO())
        warnings.simplefilter("error", RuntimeWarning)  # about a coroutine that was never awaited
        asyncio.run(cell())
        thread = threading.Thread(target=lambda: reports.append(recipe.run(progress=False)))
        thread.start()
        thread.join()
    in_loop, in_thread = reports
    assert in_loop.succeeded and in_thread.succeeded
    in_thread.raise_for_failure()
    outcomes = {made.asset: made.outcome for made in in_loop.assets}
    assert (outcomes["policy"], outcomes["evaluation"]) == ("reused", "computed") and "released_model" not in outcomes
    assert in_thread.assets[-1].asset == "released_model"
    again = Home(checkout.home).run(str(checkout.folder))
    assert {made["outcome"] for made in again["assets"]} == {"reused"}
    assert [made["fingerprint"] for made in again["assets"]] == [made.fingerprint for made in in_thread.assets]
    assert again["metrics"] == recipe.metrics() and again["model_version"] == str(recipe.versions()[0].number) == "2"


def test_failed_run_is_reported_and_raises_on_request(checkout):
    with open(checkout.folder / "preferences.jsonl", "a") as file:
        file.write("{}\n")
    edit(checkout, {**ATTRIBUTES, "data": {**ATTRIBUTES["data"], "max_quarantined": 0.0}})
    report = pedigree.load_recipe(checkout.folder, home=checkout.home).run("raw_preferences", progress=False)
    assert not report.succeeded and report.assets[-1].outcome == "failed"
    with pytest.raises(pedigree.PedigreeError, match=r"raw_preferences: .*quarantine_within_limit"):
        report.raise_for_failure()


def test_recipe_has_its_resolved_fields_and_variants(tmp_path):
    folder = write_recipe(
        tmp_path / "small", {**ATTRIBUTES, "variants": {"hot": {"training": {"loss": {"beta": 0.5}}}}}
    )
    recipe = pedigree.load_recipe(folder, home=tmp_path / "home")
    variant = pedigree.load_recipe(f"{folder}/hot", home=tmp_path / "home")
    assert (recipe.name, variant.name, recipe.file) == ("small", "small-hot", folder / "defs.yaml")
    assert (recipe.config.training.loss.beta, variant.config.training.loss.beta) == (0.1, 0.5)
    assert recipe.config.reference.model == str(folder / "base")


@pytest.mark.parametrize(
    ("call", "code", "values"),
    [
        (lambda recipe: recipe.table("evalution"), "unknown-asset", ["did you mean 'evaluation'"]),
        (lambda recipe: recipe.artifact("polcy"), "unknown-asset", ["did you mean 'policy'"]),
        (lambda recipe: recipe.run("x"), "unknown-asset", ["'x'", "released_model"]),
        (lambda recipe: recipe.table("policy"), "no-table", ["raw_preferences, tokenized_pairs, reference_logprobs, "]),
        (lambda recipe: recipe.artifact("released_model"), "no-artifact", ["`champion()`"]),
        (lambda recipe: recipe.artifact("policy"), "never-materialized", ["small/policy", "pedigree run"]),
        (lambda recipe: recipe.table("evaluation"), "never-materialized", ["small/evaluation"]),
        (lambda recipe: recipe.metrics(), "never-materialized", ["small/evaluation"]),
        (lambda recipe: recipe.training_history(), "never-materialized", ["small/policy"]),
    ],
)
def test_wrong_request_is_a_usage_error(small_recipe, tmp_path, call, code, values):
    recipe = pedigree.load_recipe(small_recipe, home=tmp_path / "home")
    with pytest.raises(pedigree.UsageError) as caught:
        call(recipe)
    check_error(caught.value, code, *values)


def test_unknown_recipe_variant_and_field_are_errors_of_pedigree(small_recipe, tmp_path):
    with pytest.raises(pedigree.UsageError) as caught:
        pedigree.load_recipe("nowhere")
    check_error(caught.value, "unknown-recipe", "nowhere", "demo")
    with pytest.raises(pedigree.UsageError) as caught:
        pedigree.load_recipe(small_recipe / "hot")
    check_error(caught.value, "unknown-variant", "hot")
    wrong = write_recipe(tmp_path / "wrong", {**ATTRIBUTES, "training": {"batchsize": 3}})
    with pytest.raises(pedigree.RecipeError) as caught:
        pedigree.load_recipe(wrong)
    check_error(caught.value, "unknown-field", "defs.yaml:", "batchsize", "batch_size")


REVEALED = {
    "recipe": "workflows.api.recipe.Recipe",
    "recipe.config.training.batch_size": "int",
    "recipe.status()": "list[workflows.state.status.AssetStatus]",
    "recipe.plan()": "list[workflows.commands.plan.PlannedAsset]",
    "recipe.run().succeeded": "bool",
    "recipe.artifact('policy').folder": "pathlib.Path",
    "recipe.metrics()": "dict[str, float]",
    "recipe.champion()": "workflows.api.model_version.ModelVersion | None",
    "recipe.versions()[0].folder()": "pathlib.Path",
}


@pytest.mark.system
def test_mypy_knows_the_types(tmp_path: Path):
    lines = ["import pedigree", "recipe = pedigree.load_recipe('demo')", *(f"reveal_type({each})" for each in REVEALED)]
    (snippet := tmp_path / "snippet.py").write_text("\n".join([*lines, "pedigree.load_recipee", ""]))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    shown = [line.split("Revealed type is ")[1].strip('"') for line in done.stdout.splitlines() if "Revealed" in line]
    assert [text.replace("builtins.", "") for text in shown] == list(REVEALED.values()), done.stdout + done.stderr
    assert 'Module has no attribute "load_recipee"' in done.stdout
