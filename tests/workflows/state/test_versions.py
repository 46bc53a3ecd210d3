"""Versions that are registered, and what people do with them: rolled back, promoted by hand, and their files removed."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import dagster as dg
import pandas as pd
import pytest
from mlflow import MlflowClient

from assets.bodies import checks
from assets.bodies.release import RELEASE_KEY_TAG, release_problem
from assets.inputs.version_repair import restore_files
from model_registry.files import local_path
from model_registry.registry import Registry
from tests.workflows.homes import flip, latest, write_recipe
from tests.workflows.in_process import Ended, Ground, InProcess, run_in
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import RegistryError
from training.contract.identity.model_identity import weights_fingerprint, weights_identity
from training.contract.protocol.job import Job
from workflows.commands.compare import last_evaluated
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

# Of 24 pairs enough are held out for the gate, and more steps give a loss that is clearly lower.
FAST = {"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
RECIPE = {**PLAIN, "data": {**PLAIN["data"], "validation_fraction": 0.5}, "training": FAST}


@pytest.fixture
def ground(tmp_path: Path, demo_maker: ModuleType) -> Iterator[Ground]:
    with run_in(tmp_path, demo_maker, {"plain": RECIPE}) as made:
        yield made


def run(ground: Ground, **edited: dict[str, Any]) -> RunReport:
    """A run of the recipe with some fields of some sections edited."""
    sections = {name: {**RECIPE.get(name, {}), **fields} for name, fields in edited.items()}
    write_recipe(ground.folders["plain"], {**RECIPE, **sections})
    report = materialize(load_recipe(ground.folders["plain"]), ground.services, ground.instance)
    assert report.succeeded, report.assets
    return report


def test_a_policy_that_was_rolled_back_does_not_return_as_another_version(ground: Ground):
    """The gate found it better, and would again, after an edit that leaves the policy as it is."""
    registry, longer = ground.services.registry, {"max_steps": 8}
    promoted = run(ground, training=longer)
    assert (promoted.model_version, promoted.is_champion) == ("2", True)
    registry.rollback("plain")
    again = run(ground, training=longer, evaluation={"max_new_tokens": 3})
    assert (again.model_version, again.is_champion, registry.champion("plain").number) == ("3", False, 1)
    assert again.reasons == f"its policy is that of version 2, which was rolled back; {promoted.reasons}"
    below = run(ground, training=longer, release={"gate": {"min_accuracy": 1.0}})
    assert (below.model_version, below.is_champion) == ("4", False)
    refused = (
        f"its policy is that of version 2, which was rolled back; held-out accuracy .* floor of 1; {promoted.reasons}"
    )
    assert re.fullmatch(refused, below.reasons or "")
    another = run(ground, training={"max_steps": 9})
    assert (another.model_version, another.is_champion) == ("5", True), "no other policy was rolled back"
    client = MlflowClient(registry.tracking_uri)
    client.set_registered_model_alias("plain", "champion", "2")
    by_hand = run(ground, training=longer)
    told = f"it was champion and was rolled back; a person has made it champion again; {promoted.reasons}"
    assert (by_hand.model_version, by_hand.is_champion, by_hand.reasons) == ("2", True, told)
    client.set_registered_model_alias("plain", "champion", "1")
    client.delete_model_version("plain", "2")
    unforgotten = run(ground, training=longer)
    assert (unforgotten.model_version, unforgotten.is_champion, unforgotten.reasons) == ("6", False, again.reasons)


def test_a_floor_of_one_source_decides_over_all_the_others(ground: Ground):
    """The labels of a second held-out set are the wrong way round: who learns from the data is wrong there."""
    folder = ground.folders["plain"]
    rows = [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]
    wrong = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[-4:]]
    for name, part in {"train": rows[:-8], "right": rows[-8:-4], "wrong": wrong}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sets = [{"path": f"{name}.jsonl", "name": name, "held_out": True} for name in ("right", "wrong")]
    data = {"sources": [{"path": "train.jsonl"}, *sets], "validation_fraction": 0}
    asked: dict[str, dict[str, Any]] = {"training": {"max_steps": 8}, "data": data}
    floored = run(ground, **asked, release={"gate": {"min_accuracy_of": {"right": 0.5, "wrong": 0.5}}})
    found = {name: floored.metrics[f"eval/sources/{name}/rewards/accuracies"] for name in ("right", "wrong")}
    assert found["right"] > 0.5 > found["wrong"], "so only one floor is missed"
    assert floored.metrics["eval/rewards/accuracies"] == sum(found.values()) / 2, "both have four pairs"
    assert (floored.model_version, floored.is_champion) == ("2", False)
    told = f"held-out accuracy of wrong {found['wrong']:.4g} is below the recipe's floor of 0.5; only "
    assert (floored.reasons or "").startswith(told), floored.reasons
    run_of_policy = MlflowClient(ground.services.registry.tracking_uri).get_run(floored.mlflow_run_id or "")
    assert run_of_policy.data.metrics["eval/sources/wrong/pairs"] == 4
    pipeline = load_recipe(folder).pipeline
    evaluated = latest(ground.instance, pipeline.key("evaluation")).metadata
    rows = [dict(record.data) for record in evaluated["sources"].records]
    assert [(row["source"], row["pairs"]) for row in rows] == [("right", "4"), ("wrong", "4")]
    assert [row["rewards/accuracies"] for row in rows] == [str(found[row["source"]]) for row in rows]
    assert not any(name.startswith("eval/sources/") for name in evaluated)
    shown = latest(ground.instance, pipeline.key("released_model")).metadata
    assert (shown["accuracy of wrong"], shown["min_accuracy of right"]) == (found["wrong"], 0.5)
    assert "min_accuracy_of absent -> {right: 0.5, wrong: 0.5}" in shown["changes"]


def test_pairs_of_one_prompt_are_no_more_than_one_to_the_gate(ground: Ground):
    """Each prompt has two pairs, which follow each other in the data of the champion, and stand far apart in the candidate's.

    The standard error is then that of the prompts' means, which are independent: s / sqrt(prompts).
    """
    file = ground.folders["plain"] / "preferences.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    again = [{**row, "chosen": [{**row["chosen"][0], "content": "It may be nothing."}]} for row in rows]
    evaluated = []
    for order, steps in ((list(chain(*zip(rows, again, strict=True))), 2), ([*rows, *again], 8)):
        file.write_text("".join(json.dumps(row) + "\n" for row in order))
        report = run(ground, training={"max_steps": steps}, release={"model_name": "twice"})
        [found] = [asset.fingerprint for asset in report.assets if asset.asset == "evaluation"]
        table = pd.read_parquet(ground.services.store.folder("evaluation", str(found)) / "pairs.parquet")
        evaluated.append(table.set_index(table["chosen_key"] + table["rejected_key"]))
    champion, candidate = evaluated
    means = (champion["loss"] - candidate["loss"]).groupby(candidate["row"] % len(rows)).mean()
    told = f"on {2 * len(means)} shared pairs of {len(means)} prompts the loss is "
    assert len(candidate) == 2 * len(means) and (report.reasons or "").startswith(told), report.reasons
    released = latest(ground.instance, load_recipe(file.parent).pipeline.key("released_model")).metadata
    assert released["standard_error"] == pytest.approx(means.std() / math.sqrt(len(means)))


def remove_files(ground: Ground) -> dict[str, Path]:
    """The files of all versions, as emptying MLflow's trash removes them; where each policy was, by its fingerprint."""
    registry = ground.services.registry
    places = {
        version.tags["pedigree.policy"]: registry.resolve(f"models:/plain/{version.number}")
        for version in registry.versions()
    }
    shutil.rmtree(ground.home / "artifacts")
    return places


def test_files_that_are_gone_are_missed_and_put_back(ground: Ground):
    """Those of the version that a run gives, and of the champion. Oracle: the store's weights, whose other names they are."""
    worse = {"optimizer": {"learning_rate": 1e-9}}
    assert run(ground, training=worse).is_champion is False
    places, pipeline = remove_files(ground), load_recipe(ground.folders["plain"]).pipeline
    released = status(pipeline, ground.services, ground.instance)[-1]
    assert (released.state, released.causes) == ("stale", ("the files of version 2 of plain are gone",))
    assert plan(pipeline, ground.services, ground.instance)[-1].causes == released.causes
    fault = verify(pipeline, ground.services, ground.instance, rows=0).artifacts[-1].fault
    assert fault is not None and fault.startswith(
        "the files of version 2 of plain are gone: remove what is left of them at"
    )
    outcomes = {asset.asset: asset.outcome for asset in run(ground, training=worse).assets}
    assert {asset for asset, outcome in outcomes.items() if outcome == "computed"} == {"released_model"}
    for version, place in places.items():
        policy = ground.services.store.folder("policy", version)
        assert (place / "model.safetensors").samefile(policy / "model.safetensors")
        assert (place / "tokenizer.json").is_file() and (place.parent / "evaluation" / "manifest.json").is_file()
    assert status(pipeline, ground.services, ground.instance)[-1].state == "fresh"
    assert {asset.outcome for asset in run(ground, training=worse).assets} == {"reused"}


def test_weights_that_rot_in_place_do_not_stay_those_of_the_champion(ground: Ground):
    """They are the store's and the version's at once: the policy is refused, moved away and trained again, to the last bit.

    The version has the spoiled file still, which whoever loads the champion would get.
    """
    registry, pipeline = ground.services.registry, load_recipe(ground.folders["plain"]).pipeline
    [version] = registry.versions()
    policy = ground.services.store.folder("policy", version.tags["pedigree.policy"])
    weights = (policy / "model.safetensors").read_bytes()
    (policy / "model.safetensors").write_bytes(b"")
    told = release_problem(ground.services, pipeline, version.tags[RELEASE_KEY_TAG]) or ""
    assert told.startswith("the files of version 1 of plain are no model any more (")
    (policy / "model.safetensors").write_bytes(weights)
    flip(policy / "model.safetensors")
    told = f"the files of version 1 of plain hold the weights [0-9a-f]{{12}} where its policy is {policy.name[:12]}"
    assert re.fullmatch(told, release_problem(ground.services, pipeline, version.tags[RELEASE_KEY_TAG]) or "")
    policy.rename(policy.with_suffix(".spoiled"))
    assert run(ground).model_version == "1"
    champion = registry.resolve("models:/plain@champion")
    assert weights_fingerprint(weights_identity(champion)) == policy.name
    assert not any(a.fault for a in verify(pipeline, ground.services, ground.instance, rows=0).artifacts)


def test_a_spoiled_evaluation_of_the_champion_is_taken_from_its_version(ground: Ground):
    """Else nothing could be released any more: a candidate is compared with it. If both are spoiled, both are named."""
    [version] = ground.services.registry.versions()
    folder = ground.services.store.folder("evaluation", version.tags["pedigree.evaluation"])
    flip(folder / "pairs.parquet")
    report = run(ground, training={"max_steps": 8})
    assert (report.model_version, report.is_champion) == ("2", True)
    assert ground.services.store.open("evaluation", folder.name)
    champion = ground.services.registry.champion("plain")
    flip(ground.services.store.folder("evaluation", champion.tags["pedigree.evaluation"]) / "pairs.parquet")
    flip(local_path(champion.source) / "evaluation" / "pairs.parquet")
    write_recipe(ground.folders["plain"], {**RECIPE, "training": {**FAST, "max_steps": 3}})
    failed = materialize(load_recipe(ground.folders["plain"]), ground.services, ground.instance)
    [error] = [asset.error for asset in failed.assets if asset.outcome == "failed"]
    told = f"evaluation of version 2 of plain, the champion, is neither in this store nor, as it was, in {champion.source}/eval"
    assert told in (error or ""), error


def test_the_gate_s_own_replacement_is_not_taken_for_a_person_s(ground: Ground):
    better = run(ground, training={"max_steps": 8})
    assert (better.model_version, better.is_champion) == ("2", True)
    back = run(ground)
    assert (back.model_version, back.is_champion) == ("1", False)
    assert back.reasons == "version 2 replaced it; there was no champion before"


def test_a_plan_needs_no_registry_that_answers(ground: Ground):
    """The recipe is what it was before: what of it was released is in the registry, if that is all there."""
    run(ground, training={"max_steps": 8})
    write_recipe(ground.folders["plain"], RECIPE)
    away = replace(ground.services, registry=Registry("http://127.0.0.1:9", ground.home / "downloads"))
    planned = plan(load_recipe(ground.folders["plain"]).pipeline, away, ground.instance)
    assert {asset.action for asset in planned} == {"reuse"}


def test_two_who_miss_the_files_at_once_put_them_back_once(ground: Ground):
    remove_files(ground)
    [version] = ground.services.registry.versions()
    with ThreadPoolExecutor(2) as both:
        assert sorted(both.map(restore_files, [ground.services] * 2, [version] * 2)) == [False, True]


def test_a_champion_whose_policy_is_gone_too_is_told_and_stops_nothing(ground: Ground, caplog):
    """One of another program, whose files are that program's affair, is not told."""
    registry, [policy] = ground.services.registry, remove_files(ground)
    shutil.rmtree(ground.services.store.folder("policy", policy))
    report = run(ground, training={"max_steps": 1, "optimizer": {"learning_rate": 1e-9}})
    assert (report.model_version, report.is_champion) == ("2", False)
    told = "the files of version 1 of plain are gone and cannot be put back: there is no policy"
    assert caplog.text.count(told) == 1
    client = MlflowClient(registry.tracking_uri)
    client.create_model_version("plain", str(ground.home / "elsewhere"))
    client.set_registered_model_alias("plain", "champion", "3")
    caplog.clear()
    assert not restore_files(ground.services, registry.champion("plain"))
    assert "are gone" not in caplog.text


def test_the_champion_is_whole_before_a_policy_starts_from_it(ground: Ground):
    """A version that nothing refers to is not put back, and is refused where it would be champion again."""
    registry, longer = ground.services.registry, {"max_steps": 8}
    promoted = run(ground, training=longer)
    remove_files(ground)
    with pytest.raises(RegistryError, match="a run of that recipe puts its files back"):
        registry.resolve("models:/plain@champion")
    with pytest.raises(RegistryError, match=r"version 1 of plain cannot be champion again: .* holds no model"):
        registry.rollback("plain")
    report = run(ground, training={**longer, "start_from": "champion"}, automation={"on_change": False})
    assert [asset.outcome for asset in report.assets if asset.asset == "policy"] == ["computed"]
    whole = registry.resolve(f"models:/plain/{promoted.model_version}")
    [policy] = [asset.fingerprint for asset in promoted.assets if asset.asset == "policy"]
    assert weights_fingerprint(weights_identity(whole)) == policy
    shutil.rmtree(ground.home / "artifacts")
    begun: dict[str, dict[str, Any]] = {
        "reference": {"model": "models:/plain@champion"},
        "automation": {"on_change": False},
    }
    assert run(ground, training=longer, **begun).succeeded, "who begins with it puts it back, too"


def test_a_policy_does_not_start_from_a_champion_that_is_spoiled(ground: Ground):
    """Its policy is gone from the store, so that nothing can be put back."""
    registry = ground.services.registry
    [version] = registry.versions()
    shutil.rmtree(ground.services.store.folder("policy", version.tags["pedigree.policy"]))
    flip(registry.resolve("models:/plain@champion") / "model.safetensors")
    going_on = {"training": {**FAST, "start_from": "champion"}, "automation": {"on_change": False}}
    write_recipe(ground.folders["plain"], {**RECIPE, **going_on})
    report = materialize(load_recipe(ground.folders["plain"]), ground.services, ground.instance)
    [error] = [asset.error for asset in report.assets if asset.outcome == "failed"]
    assert re.search(
        r"version 1 of plain leads to .*, whose weights are \w{12} where \w{12} were released", error or ""
    )


@dataclass(frozen=True)
class Promoting:
    """A launcher before whose first job of `artifact` the alias `champion` of plain comes to point at `version`."""

    registry: Registry
    artifact: str
    version: int

    def start(self, job: Job, lock: BinaryIO | None = None) -> Ended:
        if job.artifact == self.artifact:
            client = MlflowClient(self.registry.tracking_uri)
            client.set_registered_model_alias("plain", "champion", str(self.version))
        return InProcess().start(job, lock)


def test_a_run_goes_on_with_the_champion_it_began_with(ground: Ground):
    """Of another recipe's promotion, hours later, it need not know: the reference and where it starts are found already."""
    assert run(ground, training={**FAST, "max_steps": 1}).model_version == "2"
    first, second = sorted(ground.services.registry.versions(), key=lambda version: version.number)
    MlflowClient(ground.services.registry.tracking_uri).set_registered_model_alias("plain", "champion", "1")
    going_on = {
        "reference": {"model": "models:/plain@champion"},
        "training": {**FAST, "start_from": "champion"},
        "automation": {"on_change": False},
    }
    write_recipe(ground.folders["plain"], {**RECIPE, **going_on})
    services = replace(ground.services, launcher=Promoting(ground.services.registry, "reference_logprobs", 2))
    report = materialize(load_recipe(ground.folders["plain"]), services, ground.instance)
    assert report.succeeded, report.assets
    made = {asset.asset: str(asset.fingerprint) for asset in report.assets}
    spec = ground.services.store.open("training_spec", made["training_spec"]).json("spec.json")
    assert made["reference_model"] == spec["champion"] == first.weights != second.weights
    told = ground.services.registry.find_version("plain", {"pedigree.policy": made["policy"]})
    assert told is not None and told.number == 3


def splits(ground: Ground, report: RunReport) -> dict[str, set[str]]:
    """The prompts of a run in their splits, as text."""
    [found] = [asset.fingerprint for asset in report.assets if asset.asset == "raw_preferences"]
    rows = pd.read_parquet(ground.services.store.folder("raw_preferences", str(found)) / "preferences.parquet")
    told = {name: rows["prompt"][rows["split"] == name] for name in ("train", "validation")}
    return {name: {str([(turn["role"], turn["content"]) for turn in each]) for each in told[name]} for name in told}


def test_what_the_champion_was_trained_on_is_told_and_left_out_by_the_gate(ground: Ground):
    """More is held out than when it was trained. It has learned that by heart, so whoever comes next would hardly be better."""
    registry, client = ground.services.registry, MlflowClient(ground.services.registry.tracking_uri)
    pipeline, more = load_recipe(ground.folders["plain"]).pipeline, {"validation_fraction": 0.8}

    def check() -> tuple[bool, Any]:
        """Whether the latest one passed, and how many pairs it counted."""
        key = dg.AssetCheckKey(pipeline.key("evaluation"), checks.LEAKAGE)
        record = ground.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert record.evaluation is not None
        return record.evaluation.passed, record.evaluation.metadata["leaked_pairs"].value

    before = splits(ground, run(ground, training={"max_steps": 8}))
    assert check() == (True, 0)
    report = run(ground, data=more, training={"start_from": "champion"}, automation={"on_change": False})
    now = splits(ground, report)
    expected = len(now["validation"] & before["train"])
    assert 0 < expected < len(now["validation"]), "each prompt has one pair"
    assert check() == (False, expected)
    [told] = [found.description for found in report.checks if found.check == checks.LEAKAGE]
    assert f"{expected} of {len(now['validation'])} held-out pairs have prompts that were trained on before" in told
    notes = last_evaluated(pipeline, ground.services, ground.instance).notes
    assert any(f"trained on the prompts of {expected} of its" in note for note in notes), notes
    [policy] = [asset.fingerprint for asset in report.assets if asset.asset == "policy"]
    assert registry.find_version("plain", {"pedigree.policy": str(policy)}).number == 3
    client.set_registered_model_alias("plain", "champion", "3")
    other = run(ground, data=more, training={"max_steps": 3})
    shared, whose = len(now["validation"]) - expected, "whose prompts one of both was trained on before"
    assert f"{shared} shared pairs, without {expected} {whose}, the loss is" in (other.reasons or ""), other.reasons
    assert check() == (True, 0), "it started from the reference"
