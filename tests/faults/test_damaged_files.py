"""Damage to each kind of file in a home, and what the next run makes of it.

The jobs run in this process, so that the table does not take an hour. A trained model is never trained again unasked.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disturbed import CACHES
from tests.workflows.homes import check_error
from tests.workflows.in_process import Baseline, run_in
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.long

RECIPE: dict[str, Any] = {
    "data": {"sources": [{"path": "preferences.jsonl"}], "validation_fraction": 0.25},
    "tokenization": {"max_length": 128},
    "reference": {"model": "./base", "sft": {"epochs": 1, "batch_size": 8}},
    "training": {"max_steps": 3, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}},
    "evaluation": {"samples": 1, "max_new_tokens": 2},
    "release": {"model_name": "damaged"},
    "compute": {"device": "cpu"},
}
GARBAGE = bytes(range(128, 256)) * 3


def flip_a_bit(folder: Path) -> None:
    content = bytearray((file := largest(folder)).read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(folder: Path) -> None:
    file = largest(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(folder: Path) -> None:
    largest(folder).write_bytes(b"")


def remove_file(folder: Path) -> None:
    largest(folder).unlink()


def fill_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(GARBAGE)


def largest(folder: Path) -> Path:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"]
    return max(files, key=lambda file: file.stat().st_size)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of the largest file flipped": flip_a_bit,
    "the largest file cut in half": truncate,
    "the largest file empty": empty,
    "the largest file deleted": remove_file,
    "the manifest is garbage": fill_manifest,
    "the folder deleted": shutil.rmtree,
}
TRAINED = ("reference_model", "policy")
ARTIFACTS = ("raw_preferences", "tokenization_spec", "tokenized_pairs", *TRAINED, "reference_logprobs", "evaluation")
FAULTS = list(itertools.product(ARTIFACTS, DAMAGES))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with run_in(tmp_path_factory.mktemp("damaged"), {"damaged": RECIPE}) as made:
        yield made


def run(baseline: Baseline) -> RunReport:
    return materialize(load_recipe(baseline.folders["damaged"]), baseline.services, baseline.instance)


def check_same(report: RunReport, baseline: Baseline) -> None:
    assert report.succeeded, [asset.error for asset in report.assets if asset.error]
    assert {asset.asset: asset.fingerprint for asset in report.assets} == baseline.fingerprints["damaged"]


@pytest.mark.parametrize(("artifact", "damage"), FAULTS)
def test_damaged_artifact_is_made_again_or_named(
    artifact: str, damage: str, baseline: Baseline, tmp_path: Path, record: Callable[..., None]
) -> None:
    folder = baseline.services.store.folder(artifact, str(baseline.fingerprints["damaged"][artifact]))
    shutil.copytree(folder, tmp_path / "backup")
    DAMAGES[damage](folder)
    report = run(baseline)
    if artifact in TRAINED and damage != "the folder deleted":  # to delete it is how a user consents
        [failed] = [asset for asset in report.assets if asset.outcome == "failed"]
        assert failed.asset == artifact
        check_error(failed.error, "corrupt-model", folder)
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup", folder)
        check_same(run(baseline), baseline)
        outcome = "refused until it is restored: `[corrupt-model]`"
    else:
        check_same(report, baseline)
        assert [asset.outcome for asset in report.assets if asset.asset == artifact] == ["computed"]
        outcome = "made again"
    record(artifact, damage, outcome, same=True)


RECORDS = list(itertools.product(ARTIFACTS, ("garbage", "deleted")))


@pytest.mark.parametrize(("artifact", "damage"), RECORDS)
def test_damaged_key_records_lose_nothing(
    artifact: str, damage: str, baseline: Baseline, record: Callable[..., None]
) -> None:
    """A record that is garbage is written again from the manifest. Without any record, the work is done again."""
    records = list((baseline.services.store.root / "keys" / artifact).glob("*.json"))
    for file in records:
        file.write_bytes(GARBAGE) if damage == "garbage" else file.unlink()
    report = run(baseline)
    check_same(report, baseline)
    [outcome] = [asset.outcome for asset in report.assets if asset.asset == artifact]
    assert outcome == ("reused" if damage == "garbage" else "computed")
    record(artifact, f"all key records {damage}", "made again" if outcome == "computed" else outcome, same=True)


SHARDS = list(
    itertools.product(
        CACHES, ("a bit of the largest file flipped", "the largest file cut in half", "the manifest is garbage")
    )
)


@pytest.mark.parametrize(("stage", "damage"), SHARDS)
def test_damaged_shard_of_a_cache_is_set_aside(
    stage: str, damage: str, baseline: Baseline, record: Callable[..., None]
) -> None:
    """The artifact is gone too, so the pass reads the cache."""
    store = baseline.services.store
    for manifest in store.root.parent.glob(f"{CACHES[stage]}/*/*/manifest.json"):
        DAMAGES[damage](manifest.parent)
    shutil.rmtree(store.root / stage)
    shutil.rmtree(store.root / "keys" / stage)
    report = run(baseline)
    check_same(report, baseline)
    assert list((store.root / "corrupt" / Path(CACHES[stage]).name).rglob("manifest.json"))
    record(stage, f"shard of its cache: {damage}", "shard set aside; its rows are made again", same=True)


STATE = ("hashes.json", "names", "pages", "records", "processes", "jobs")


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("damage", ["garbage", "deleted"])
def test_damaged_files_beside_the_store_lose_nothing(
    name: str, damage: str, baseline: Baseline, record: Callable[..., None]
) -> None:
    path = baseline.home / name
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    for file in files:
        file.write_bytes(GARBAGE) if damage == "garbage" else file.unlink()
    report = run(baseline)
    check_same(report, baseline)
    assert {asset.outcome for asset in report.assets} <= {"reused", "computed"}
    record("home", f"`{name}` is {damage}", "nothing is lost", same=True)
