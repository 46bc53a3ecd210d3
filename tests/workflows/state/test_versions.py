"""Registered versions after a rollback, a manual promotion, or the loss of their files."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import dagster as dg
import pandas as pd
import pytest
from mlflow import MlflowClient

from assets.bodies import checks
from assets.bodies.release.released_model import RELEASE_KEY_TAG, release_problem
from assets.inputs.version_repair import restore_files
from model_registry.files import local_path
from model_registry.registry import Registry
from tests.workflows.homes import check_error, check_values, flip, latest, write_recipe
from tests.workflows.in_process import Baseline, EndedJob, InProcess
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import RegistryError
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.job import Job
from workflows.commands.compare import last_evaluated
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

# Of 24 pairs enough are held out for the gate, and more steps give a clearly lower loss.
FAST = {"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
RECIPE = {
    **PLAIN,
    "data": {**PLAIN["data"], "validation_fraction": 0.5},
    "training": FAST,
    "release": {**PLAIN["release"], "gate": {"type": "ladder"}},
}


@pytest.fixture
def baseline(tmp_path: Path, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    with prepared_homes.copied_to(tmp_path, {"plain": RECIPE}) as made:
        yield made


def run(baseline: Baseline, **edited: dict[str, Any]) -> RunReport:
    """Run the recipe with some fields of some sections edited."""
    sections = {name: {**RECIPE.get(name, {}), **fields} for name, fields in edited.items()}
    write_recipe(baseline.folders["plain"], {**RECIPE, **sections})
    report = materialize(load_recipe(baseline.folders["plain"]), baseline.services, baseline.instance)
    assert report.succeeded, report.assets
    return report


def test_rolled_back_policy_does_not_return_as_another_version(baseline: Baseline):
    """The gate found it better and would again, after an edit that leaves the policy the same."""
    registry, longer = baseline.services.registry, {"max_steps": 8}
    promoted = run(baseline, training=longer)
    assert (promoted.model_version, promoted.is_champion) == ("2", True)
    registry.rollback("plain")
    again = run(baseline, training=longer, evaluation={"max_new_tokens": 3})
    assert (again.model_version, again.is_champion, registry.champion("plain").number) == ("3", False, 1)
    rolled_back = "[^;]*version 2[^;]*rolled back"
    assert re.fullmatch(f"{rolled_back}; {re.escape(promoted.reasons)}", again.reasons or "")
    below = run(baseline, training=longer, release={"gate": {"type": "ladder", "min_accuracy": 1.0}})
    assert (below.model_version, below.is_champion) == ("4", False)
    refused = f"{rolled_back}; held-out accuracy .* floor of 1; {re.escape(promoted.reasons)}"
    assert re.fullmatch(refused, below.reasons or "")
    another = run(baseline, training={"max_steps": 9})
    assert (another.model_version, another.is_champion) == ("5", True), "no other policy was rolled back"
    client = MlflowClient(registry.tracking_uri)
    client.set_registered_model_alias("plain", "champion", "2")
    by_hand = run(baseline, training=longer)
    assert (by_hand.model_version, by_hand.is_champion) == ("2", True)
    restored = f"[^;]*rolled back; [^;]*user[^;]*champion[^;]*; {re.escape(promoted.reasons)}"
    assert re.fullmatch(restored, by_hand.reasons or "")
    client.set_registered_model_alias("plain", "champion", "1")
    client.delete_model_version("plain", "2")
    unforgotten = run(baseline, training=longer)
    assert (unforgotten.model_version, unforgotten.is_champion, unforgotten.reasons) == ("6", False, again.reasons)


def test_a_floor_of_one_source_decides_over_all_the_others(baseline: Baseline):
    """The labels of a second held-out set are swapped: a policy that learns from the data is wrong on it."""
    folder = baseline.folders["plain"]
    rows = [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]
    wrong = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[-4:]]
    for name, part in {"train": rows[:-8], "right": rows[-8:-4], "wrong": wrong}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sets = [{"path": f"{name}.jsonl", "name": name, "held_out": True} for name in ("right", "wrong")]
    data = {"sources": [{"path": "train.jsonl"}, *sets], "validation_fraction": 0}
    asked: dict[str, dict[str, Any]] = {"training": {"max_steps": 8}, "data": data}
    floored = run(
        baseline, **asked, release={"gate": {"type": "ladder", "min_accuracy_of": {"right": 0.5, "wrong": 0.5}}}
    )
    found = {name: floored.metrics[f"eval/sources/{name}/rewards/accuracies"] for name in ("right", "wrong")}
    assert found["right"] > 0.5 > found["wrong"], "only one floor is missed"
    assert floored.metrics["eval/rewards/accuracies"] == sum(found.values()) / 2, "both have four pairs"
    assert (floored.model_version, floored.is_champion) == ("2", False)
    reasons = rf"[^;]* of wrong {found['wrong']:.4g} [^;]*floor of 0\.5; only "
    assert re.match(reasons, floored.reasons or ""), floored.reasons
    run_of_policy = MlflowClient(baseline.services.registry.tracking_uri).get_run(floored.mlflow_run_id or "")
    assert run_of_policy.data.metrics["eval/sources/wrong/pairs"] == 4
    pipeline = load_recipe(folder).pipeline
    evaluated = latest(baseline.instance, pipeline.key("evaluation")).metadata
    rows = [dict(record.data) for record in evaluated["sources"].records]
    assert [(row["source"], row["pairs"]) for row in rows] == [("right", "4"), ("wrong", "4")]
    assert [row["rewards/accuracies"] for row in rows] == [str(found[row["source"]]) for row in rows]
    assert not any(name.startswith("eval/sources/") for name in evaluated)
    shown = latest(baseline.instance, pipeline.key("released_model")).metadata
    assert (shown["accuracy of wrong"], shown["min_accuracy of right"]) == (found["wrong"], 0.5)
    assert "min_accuracy_of absent -> {right: 0.5, wrong: 0.5}" in shown["changes"]


def test_gate_counts_pairs_of_one_prompt_as_one(baseline: Baseline):
    """Each prompt has two pairs. They are adjacent in the champion's data, and far apart in the candidate's.

    The means of the prompts are independent, so the standard error is s / sqrt(prompts).
    """
    file = baseline.folders["plain"] / "preferences.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    again = [{**row, "chosen": [{**row["chosen"][0], "content": "It may be nothing."}]} for row in rows]
    evaluated = []
    for order, steps in ((list(chain(*zip(rows, again, strict=True))), 2), ([*rows, *again], 8)):
        file.write_text("".join(json.dumps(row) + "\n" for row in order))
        report = run(baseline, training={"max_steps": steps}, release={"model_name": "twice"})
        [found] = [asset.fingerprint for asset in report.assets if asset.asset == "evaluation"]
        table = pd.read_parquet(baseline.services.store.folder("evaluation", str(found)) / "pairs.parquet")
        evaluated.append(table.set_index(table["chosen_key"] + table["rejected_key"]))
    champion, candidate = evaluated
    means = (champion["loss"] - candidate["loss"]).groupby(candidate["row"] % len(rows)).mean()
    assert len(candidate) == 2 * len(means)
    check_values(report.reasons, f"{2 * len(means)} shared pairs of {len(means)} prompts", " loss ")
    released = latest(baseline.instance, load_recipe(file.parent).pipeline.key("released_model")).metadata
    assert released["standard_error"] == pytest.approx(means.std() / math.sqrt(len(means)), rel=1e-3)


def remove_files(baseline: Baseline) -> dict[str, Path]:
    """Remove the files of all versions, as emptying MLflow's trash does. Return the folder of each policy, by fingerprint."""
    registry = baseline.services.registry
    places = {
        version.tags["pedigree.policy"]: registry.resolve(f"models:/plain/{version.number}")
        for version in registry.versions()
    }
    shutil.rmtree(baseline.home / "mlflow" / "artifacts")
    return places


def test_missing_files_of_versions_are_reported_and_restored(baseline: Baseline):
    """The versions of the run and of the champion. Oracle: their weights are hard links to the store's."""
    worse = {"optimizer": {"learning_rate": 1e-9}}
    assert run(baseline, training=worse).is_champion is False
    released_policy = max(baseline.services.registry.versions(), key=lambda version: version.number).weights
    places, pipeline = remove_files(baseline), load_recipe(baseline.folders["plain"]).pipeline
    released = status(pipeline, baseline.services, baseline.instance)[-1]
    assert released.state == "stale"
    check_values(*released.causes, "files of version 2 of plain", "missing")
    assert plan(pipeline, baseline.services, baseline.instance)[-1].causes == released.causes
    fault = verify(pipeline, baseline.services, baseline.instance, rows=0).artifacts[-1].fault
    check_values(fault, *released.causes, places[released_policy].parent)
    outcomes = {asset.asset: asset.outcome for asset in run(baseline, training=worse).assets}
    assert {asset for asset, outcome in outcomes.items() if outcome == "computed"} == {"released_model"}
    for version, place in places.items():
        policy = baseline.services.store.folder("policy", version)
        assert (place / "model.safetensors").samefile(policy / "model.safetensors")
        assert (place / "tokenizer.json").is_file() and (place.parent / "evaluation" / "manifest.json").is_file()
    assert status(pipeline, baseline.services, baseline.instance)[-1].state == "fresh"
    assert {asset.outcome for asset in run(baseline, training=worse).assets} == {"reused"}


def test_corrupt_weights_of_the_champion_are_trained_again(baseline: Baseline):
    """Store and version share the file: the policy is refused, moved away and trained again, bit for bit.

    The version still has the corrupt file, and gives it to everyone who loads the champion.
    """
    registry, pipeline = baseline.services.registry, load_recipe(baseline.folders["plain"]).pipeline
    [version] = registry.versions()
    policy = baseline.services.store.folder("policy", version.tags["pedigree.policy"])
    weights = (policy / "model.safetensors").read_bytes()
    (policy / "model.safetensors").write_bytes(b"")
    problem = release_problem(baseline.services, pipeline, version.tags[RELEASE_KEY_TAG])
    assert re.fullmatch(r"the files of version 1 of plain .*\(.*model\.safetensors.*\)", problem or "")
    (policy / "model.safetensors").write_bytes(weights)
    flip(policy / "model.safetensors")
    problem = release_problem(baseline.services, pipeline, version.tags[RELEASE_KEY_TAG])
    assert re.fullmatch(rf"the files of version 1 of plain .* [0-9a-f]{{12}}\b.* {policy.name[:12]}", problem or "")
    policy.rename(policy.with_suffix(".corrupt"))
    assert run(baseline).model_version == "1"
    champion = registry.resolve("models:/plain@champion")
    assert weights_identity(champion).fingerprint == policy.name
    assert not any(a.fault for a in verify(pipeline, baseline.services, baseline.instance, rows=0).artifacts)


def test_corrupt_evaluation_of_the_champion_is_read_from_its_version(baseline: Baseline):
    """A release compares a candidate with the champion's evaluation. If both copies are corrupt, the message names both."""
    [version] = baseline.services.registry.versions()
    folder = baseline.services.store.folder("evaluation", version.fingerprint_of("evaluation"))
    flip(folder / "pairs.parquet")
    report = run(baseline, training={"max_steps": 8})
    assert (report.model_version, report.is_champion) == ("2", True)
    assert baseline.services.store.open("evaluation", folder.name)
    champion = baseline.services.registry.champion("plain")
    flip(baseline.services.store.folder("evaluation", champion.fingerprint_of("evaluation")) / "pairs.parquet")
    flip(local_path(champion.source) / "evaluation" / "pairs.parquet")
    write_recipe(baseline.folders["plain"], {**RECIPE, "training": {**FAST, "max_steps": 3}})
    failed = materialize(load_recipe(baseline.folders["plain"]), baseline.services, baseline.instance)
    [error] = [asset.error for asset in failed.assets if asset.outcome == "failed"]
    check_error(error, "champion-corrupt", "evaluation of version 2 of plain", f"{champion.source}/evaluation")


def test_replacement_by_the_gate_does_not_count_as_a_rollback(baseline: Baseline):
    better = run(baseline, training={"max_steps": 8})
    assert (better.model_version, better.is_champion) == ("2", True)
    back = run(baseline)
    assert (back.model_version, back.is_champion) == ("1", False)
    assert re.fullmatch("version 2 replaced it; .*no champion before", back.reasons or "")


def test_a_plan_needs_no_registry_that_answers(baseline: Baseline):
    """The recipe is the same as before, and its release is in the registry, if that exists."""
    run(baseline, training={"max_steps": 8})
    write_recipe(baseline.folders["plain"], RECIPE)
    away = replace(baseline.services, registry=Registry("http://127.0.0.1:9", baseline.home / "mlflow" / "downloads"))
    planned = plan(load_recipe(baseline.folders["plain"]).pipeline, away, baseline.instance)
    assert {asset.action for asset in planned} == {"reuse"}


def test_concurrent_restores_of_files_write_them_once(baseline: Baseline):
    remove_files(baseline)
    [version] = baseline.services.registry.versions()
    with ThreadPoolExecutor(2) as both:
        assert sorted(both.map(restore_files, [baseline.services] * 2, [version] * 2)) == [False, True]


def test_champion_with_missing_files_and_policy_is_reported_and_blocks_nothing(baseline: Baseline, caplog):
    """A version of another program is not reported: its files are that program's concern."""
    registry, [policy] = baseline.services.registry, remove_files(baseline)
    shutil.rmtree(baseline.services.store.folder("policy", policy))
    report = run(baseline, training={"max_steps": 1, "optimizer": {"learning_rate": 1e-9}})
    assert (report.model_version, report.is_champion) == ("2", False)
    warnings = [record.message for record in caplog.records if "the files of version 1 of plain" in record.message]
    assert len(warnings) == 1
    check_error(warnings[0], "no-artifact", f" policy {policy[:12]} ")
    client = MlflowClient(registry.tracking_uri)
    client.create_model_version("plain", str(baseline.home / "elsewhere"))
    client.set_registered_model_alias("plain", "champion", "3")
    caplog.clear()
    assert not restore_files(baseline.services, registry.champion("plain"))
    assert "the files of version" not in caplog.text


def test_champions_files_are_restored_before_a_policy_starts_from_it(baseline: Baseline):
    """An unreferenced version is not restored, and is refused if it would be champion again."""
    registry, longer = baseline.services.registry, {"max_steps": 8}
    promoted = run(baseline, training=longer)
    remove_files(baseline)
    with pytest.raises(RegistryError, match=r"version 2 of plain: .*\[version-without-files\]"):
        registry.resolve("models:/plain@champion")
    with pytest.raises(RegistryError, match=r"version 1 of plain .*\[version-without-files\]"):
        registry.rollback("plain")
    report = run(baseline, training={**longer, "start_from": "champion"}, automation={"on_change": False})
    assert [asset.outcome for asset in report.assets if asset.asset == "policy"] == ["computed"]
    whole = registry.resolve(f"models:/plain/{promoted.model_version}")
    [policy] = [asset.fingerprint for asset in promoted.assets if asset.asset == "policy"]
    assert weights_identity(whole).fingerprint == policy
    shutil.rmtree(baseline.home / "mlflow" / "artifacts")
    begun: dict[str, dict[str, Any]] = {
        "reference": {"model": "models:/plain@champion"},
        "automation": {"on_change": False},
    }
    assert run(baseline, training=longer, **begun).succeeded, "the run that starts from it restores it, too"


def test_policy_does_not_start_from_a_corrupt_champion(baseline: Baseline):
    """Its policy is missing from the store, so nothing can be restored."""
    registry = baseline.services.registry
    [version] = registry.versions()
    shutil.rmtree(baseline.services.store.folder("policy", version.tags["pedigree.policy"]))
    flip(registry.resolve("models:/plain@champion") / "model.safetensors")
    going_on = {"training": {**FAST, "start_from": "champion"}, "automation": {"on_change": False}}
    write_recipe(baseline.folders["plain"], {**RECIPE, **going_on})
    report = materialize(load_recipe(baseline.folders["plain"]), baseline.services, baseline.instance)
    [error] = [asset.error for asset in report.assets if asset.outcome == "failed"]
    assert re.search(r"version 1 of plain in .* \w{12}, .* \w{12}.*\[version-files-differ\]$", error or ""), error


@dataclass(frozen=True)
class Promoting:
    """An engine. Before its first job of `artifact` it points the alias `champion` of plain at `version`."""

    registry: Registry
    artifact: str
    version: int

    def find(self, job: Job) -> None:
        return None

    def submit(self, job: Job, lock: BinaryIO | None = None) -> EndedJob:
        if job.artifact == self.artifact:
            client = MlflowClient(self.registry.tracking_uri)
            client.set_registered_model_alias("plain", "champion", str(self.version))
        return InProcess().submit(job, lock)


def test_run_keeps_the_champion_of_its_beginning(baseline: Baseline):
    """A promotion by another recipe hours later has no effect: the reference and the start are already resolved."""
    assert run(baseline, training={**FAST, "max_steps": 1}).model_version == "2"
    first, second = sorted(baseline.services.registry.versions(), key=lambda version: version.number)
    MlflowClient(baseline.services.registry.tracking_uri).set_registered_model_alias("plain", "champion", "1")
    going_on = {
        "reference": {"model": "models:/plain@champion"},
        "training": {**FAST, "start_from": "champion"},
        "automation": {"on_change": False},
    }
    write_recipe(baseline.folders["plain"], {**RECIPE, **going_on})
    services = replace(baseline.services, engine=Promoting(baseline.services.registry, "reference_logprobs", 2))
    report = materialize(load_recipe(baseline.folders["plain"]), services, baseline.instance)
    assert report.succeeded, report.assets
    made = {asset.asset: str(asset.fingerprint) for asset in report.assets}
    spec = baseline.services.store.open("training_spec", made["training_spec"]).json("spec.json")
    assert made["reference_model"] == spec["champion"] == first.weights != second.weights
    version = baseline.services.registry.find_version("plain", {"pedigree.policy": made["policy"]})
    assert version is not None and version.number == 3


def splits(baseline: Baseline, report: RunReport) -> dict[str, set[str]]:
    """Return the prompts of a run in their splits, as text."""
    [found] = [asset.fingerprint for asset in report.assets if asset.asset == "raw_preferences"]
    rows = pd.read_parquet(baseline.services.store.folder("raw_preferences", str(found)) / "preferences.parquet")
    prompts = {name: rows["prompt"][rows["split"] == name] for name in ("train", "validation")}
    return {
        name: {str([(turn["role"], turn["content"]) for turn in prompt]) for prompt in prompts[name]}
        for name in prompts
    }


def test_leaked_pairs_are_reported_and_left_out_by_the_gate(baseline: Baseline):
    """More pairs are held out than at its training. It memorized them, so a later policy would hardly be better on them."""
    registry, client = baseline.services.registry, MlflowClient(baseline.services.registry.tracking_uri)
    pipeline, more = load_recipe(baseline.folders["plain"]).pipeline, {"validation_fraction": 0.8}

    def check() -> tuple[bool, Any]:
        """Return whether the latest check passed, and its number of pairs."""
        key = dg.AssetCheckKey(pipeline.key("evaluation"), checks.LEAKAGE)
        record = baseline.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert record.evaluation is not None
        return record.evaluation.passed, record.evaluation.metadata["leaked_pairs"].value

    before = splits(baseline, run(baseline, training={"max_steps": 8}))
    assert check() == (True, 0)
    report = run(baseline, data=more, training={"start_from": "champion"}, automation={"on_change": False})
    now = splits(baseline, report)
    expected = len(now["validation"] & before["train"])
    assert 0 < expected < len(now["validation"]), "each prompt has one pair"
    assert check() == (False, expected)
    [description] = [found.description for found in report.checks if found.check == checks.LEAKAGE]
    assert f"{expected} of {len(now['validation'])} held-out pairs" in description
    notes = last_evaluated(pipeline, baseline.services, baseline.instance).notes
    assert any(f" prompts of {expected} of its {len(now['validation'])} pairs" in note for note in notes), notes
    [policy] = [asset.fingerprint for asset in report.assets if asset.asset == "policy"]
    assert registry.find_version("plain", {"pedigree.policy": str(policy)}).number == 3
    client.set_registered_model_alias("plain", "champion", "3")
    other = run(baseline, data=more, training={"max_steps": 3})
    shared = len(now["validation"]) - expected
    check_values(other.reasons, f"{shared} shared pairs, without {expected} ", " loss ")
    assert check() == (True, 0), "it started from the reference"
