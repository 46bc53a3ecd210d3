"""One recipe from its files to a champion, through the command, with real processes and a real database."""

import json
import math
from pathlib import Path

import mlflow.transformers
import pytest
from mlflow import MlflowClient

from model_registry.files import local_path
from tests.workflows.homes import check_error
from tests.workflows.recipes.test_discovery import EXPECTED

pytestmark = pytest.mark.slow

ASSETS = list(EXPECTED)


def steps_of(home, report):
    """Return the step events that the policy keeps, in order."""
    [policy] = [asset for asset in report["assets"] if asset["asset"] == "policy"]
    lines = (home.path / "store" / "policy" / policy["fingerprint"] / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


def test_everything_is_computed_once(materialized, small_recipe):
    home, first = materialized
    assert [(a["asset"], a["outcome"]) for a in first["assets"]] == [(name, "computed") for name in ASSETS]
    again = home.run(str(small_recipe))
    assert [(a["asset"], a["outcome"]) for a in again["assets"]] == [(name, "reused") for name in ASSETS]
    assert [a["fingerprint"] for a in again["assets"]] == [a["fingerprint"] for a in first["assets"]]
    assert (again["metrics"], again["mlflow_run_id"]) == (first["metrics"], first["mlflow_run_id"])
    assert again["model_version"] == first["model_version"] == "1"
    assert (again["is_champion"], again["reasons"]) == (first["is_champion"], first["reasons"])
    assert first["is_champion"] is True and first["reasons"]


def test_policy_learns(materialized):
    """ln 2 is the loss of a policy that equals the reference."""
    _, report = materialized
    assert report["metrics"]["eval/loss"] < math.log(2)
    assert report["metrics"]["eval/rewards/accuracies"] > 0.5


def test_policy_has_one_event_per_step(materialized):
    home, report = materialized
    steps = steps_of(home, report)
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


# A policy is not made from the scores of arriving pairs: they are made before it, so that no policy scores its own pairs.
NOT_IN_LINEAGE = {"prequential_scores", "released_model"}
OUTSIDE_POLICY = {"evaluation_spec", "evaluation", "release_spec", *NOT_IN_LINEAGE}


def test_the_rewards_are_in_mlflow(materialized):
    home, report = materialized
    client = MlflowClient(f"sqlite:///{home.path}/mlflow/mlflow.db")
    run = client.get_run(report["mlflow_run_id"])
    steps = steps_of(home, report)
    for name in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "grad_norm"):
        history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
        assert history == {event["step"]: event[name] for event in steps}
    assert run.data.params["training.loss.beta"] == "0.1"
    assert run.data.metrics["eval/loss"] == report["metrics"]["eval/loss"]
    fingerprints = {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}
    lineage = {name: found for name, found in fingerprints.items() if name not in OUTSIDE_POLICY}
    assert {**json.loads(run.data.tags["lineage"]), "policy": run.data.tags["policy"]} == lineage
    assert not OUTSIDE_POLICY & run.data.tags.keys()
    assert run.info.run_name == "small v1"
    train, held_out = run.inputs.dataset_inputs
    assert (train.dataset.name, held_out.dataset.name) == ("training pairs", "held-out pairs")
    assert fingerprints["tokenized_pairs"].startswith(train.dataset.digest)


def test_the_page_of_the_version_tells_its_lineage(materialized):
    home, report = materialized
    version = MlflowClient(f"sqlite:///{home.path}/mlflow/mlflow.db").get_model_version(
        "small", report["model_version"]
    )
    fingerprints = {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}
    made_from = {name: found for name, found in fingerprints.items() if name not in NOT_IN_LINEAGE}
    assert version.description.startswith("Champion: there was no champion before\n\nRecipe small. ")
    files = local_path(version.source)
    assert files is not None and json.loads((files / "lineage.json").read_text()) == made_from
    assert (
        len(version.tags) <= 6
        and f"| policy | `{made_from['policy'][:12]}` |" in (files / "model/README.md").read_text()
    )


def test_the_champion_loads_and_answers(materialized, monkeypatch):
    home, _ = materialized
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home.path}/mlflow/mlflow.db")
    pipeline = mlflow.transformers.load_model("models:/small@champion")
    [answer] = pipeline("What is the opposite of hot?", max_new_tokens=3)
    assert isinstance(answer["generated_text"], str)


def test_the_weights_lie_on_the_disk_once(materialized):
    home, report = materialized
    [policy] = [asset for asset in report["assets"] if asset["asset"] == "policy"]
    weights = home.path / "store" / "policy" / policy["fingerprint"] / "model.safetensors"
    released = [p for p in Path(home.path, "mlflow", "artifacts").rglob("model.safetensors") if p.samefile(weights)]
    assert len(released) == 1


def test_afterwards_everything_is_fresh(materialized, small_recipe):
    """Status after an edit is tested in this process."""
    found = materialized[0].query("status", str(small_recipe))["assets"]
    assert [(a["asset"], a["state"], a["causes"]) for a in found] == [(name, "fresh", []) for name in ASSETS]


@pytest.mark.parametrize("command", ["status", "plan", "verify"])
def test_text_output_has_the_assets_of_json(command, materialized, small_recipe):
    home = materialized[0]
    found = home.query(command, str(small_recipe))
    lines = home.invoke(command, str(small_recipe)).stdout.splitlines()
    assets = found["artifacts" if command == "verify" else "assets"]
    verdict = {"status": "fresh", "plan": "reuse", "verify": "ok"}[command]
    assert [asset["asset"] for asset in assets] == ASSETS
    for asset in assets:
        [line] = [line for line in lines if line.startswith(f"│ {asset['asset']} ")]
        assert verdict in line and asset.get("fingerprint", "")[:12] in line
    for row in found.get("rescored", []):
        assert any(f"{row['chosen']['live']:.5f}" in line and f"│ {row['row']} " in line for line in lines)


def test_text_output_has_the_pairs_of_json(materialized, small_recipe):
    home, report = materialized
    [compared] = home.query("compare", str(small_recipe))["recipes"]
    [line] = [
        each for each in home.invoke("compare", str(small_recipe)).stdout.splitlines() if each.startswith(" small ")
    ]
    assert line.split()[1:] == [f"{mean:.3f}" for mean in compared["means"].values()]
    assert float(line.split()[1]) == pytest.approx(report["metrics"]["eval/rewards/accuracies"], abs=6e-4)
    row = home.query("inspect", str(small_recipe), "--row", "3")
    text = home.invoke("inspect", str(small_recipe), "--row", "3").stdout
    for name in ("chosen", "rejected"):
        assert f"{name}: {len(row[name]['token_ids'])} tokens, {sum(row[name]['mask'])} of them trained" in text
        assert f"reference log-prob {row[name]['reference_logprob']:.4f}" in text
    kept = home.query("gc")["kept"]
    assert f"{kept} artifacts are kept" in home.invoke("gc").stdout


def test_a_comparison_is_of_all_pairs_or_of_those_of_a_source(materialized, small_recipe):
    home, report = materialized
    [whole] = home.query("compare", str(small_recipe))["recipes"]
    assert (whole["pairs"], whole["notes"]) == (report["metrics"]["eval/pairs"], [])
    part = home.invoke("compare", str(small_recipe), "--source", "poems")
    assert part.exit_code == 2
    check_error(part.stderr, "unknown-source-name", "`poems`", "(names: none)")


def test_unwritable_page_is_reported_with_its_path(materialized, small_recipe):
    done = materialized[0].invoke("inspect", str(small_recipe), "--row", "0", "--html", "/dev/null/page.html")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    check_error(done.stderr, "unwritable-file", "`--html /dev/null/page.html`", " /dev/null: ")
    assert "PEDIGREE_HOME" not in done.stderr, "the page is not the cause"


def test_inspect_shows_tokens_and_logprobs(materialized, small_recipe):
    """Inspect a whole row: the masked tokens are the response, and a held-out pair has both log-probs."""
    home, _ = materialized
    rows = [home.query("inspect", str(small_recipe), "--row", str(row)) for row in (0, 1, 2, 3)]
    for number, row in enumerate(rows):
        assert row["row"] == number
        for side in ("chosen", "rejected"):
            assert len(row[side]["token_ids"]) == len(row[side]["mask"]) == len(row[side]["texts"])
            assert row[side]["mask"][0] is False and row[side]["mask"][-1] is True
            assert row[side]["reference_logprob"] < 0
            assert (row[side]["policy_logprob"] is None) == (row["split"] == "train")
    for beyond in ("9999", str(10**20)):
        done = home.invoke("inspect", str(small_recipe), "--row", beyond)
        assert done.exit_code == 2
        check_error(done.stderr, "unknown-row", "raw_preferences", f" {beyond}")
