"""Policies as registered versions, in a real registry: loadable, found again, stored once on disk, and rolled back."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import chdir, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from model_registry.connection import connect
from model_registry.files import link_or_copy, local_path
from model_registry.mlflow_types import DatasetRef
from model_registry.model_version import PREVIOUS_TAG, ROLLED_BACK_TAG, Version
from model_registry.registry import Registry
from model_registry.tracking import Tracker
from training.contract.errors import RegistryError, UnknownModel
from training.contract.identity.model_identity import weights_identity

pytestmark = pytest.mark.slow

IDENTITY = {"pedigree.policy": "a" * 64}
# Loads by the champion's address, in a separate process and from another folder, as a user would.
USE_MODEL = """
import json, sys, mlflow, torch
uri, plain = sys.argv[1:]
mlflow.set_tracking_uri(uri)
from transformers import AutoModelForCausalLM
parts = mlflow.transformers.load_model("models:/demo@champion", return_type="components")
ids = parts["tokenizer"].apply_chat_template([{"role": "user", "content": "tell me"}], add_generation_prompt=True,
                                             return_tensors="pt", return_dict=True)["input_ids"]
ours = AutoModelForCausalLM.from_pretrained(plain, dtype="auto").generate(ids, max_new_tokens=8, do_sample=False)
loaded = parts["model"].generate(ids, max_new_tokens=8, do_sample=False)
chat = mlflow.pyfunc.load_model("models:/demo@champion")
answer = chat.predict({"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 8})
print(json.dumps({"same": bool(torch.equal(ours, loaded)), "dtype": str(parts["model"].dtype), "answer": answer,
                  "prompt_tokens": ids.shape[1]}))
"""


@pytest.fixture
def registry(uri: str, tmp_path: Path) -> Registry:
    return Registry(uri, tmp_path / "downloads")


@dataclass(frozen=True)
class Registered:
    """The tiny policy as champion of `demo`, in its own database."""

    uri: str
    run_id: str
    registry: Registry
    version: Version


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path, policy: Path) -> Registered:
    """The packaging process starts in a folder with a file named like the package it needs."""
    home = tmp_path_factory.mktemp("registered home")
    shutil.copy(migrated_database, home / "mlflow.db")
    uri = f"sqlite:///{home / 'mlflow.db'}"
    run_id = new_run(Tracker(uri, home / "artifacts"))
    registry = Registry(uri, home / "downloads")
    (elsewhere := tmp_path_factory.mktemp("elsewhere") / "model_registry.py").write_text("raise ImportError(__file__)")
    with chdir(elsewhere.parent):
        version = registry.register(
            "demo", policy, run_id, identity=IDENTITY, tags={"pedigree.tokenized_pairs": "b" * 64}
        )
    assert registry.promote(version, over=None)
    return Registered(uri, run_id, registry, version)


def new_run(tracker: Tracker) -> str:
    used = DatasetRef("c" * 64, "preferences.jsonl", {"train": 9, "validation": 1})
    with tracker.run(experiment="demo", key="a", name="a", params={}, tags={}, dataset=used) as run:
        pass
    assert run.run_id is not None
    return run.run_id


def add_versions(tracker: Tracker, count: int) -> None:
    """Add versions of `demo` without files, for tests that only move aliases."""
    client, run_id = MlflowClient(tracker.tracking_uri), new_run(tracker)
    client.create_registered_model("demo")
    source = f"{client.get_run(run_id).info.artifact_uri}/policy"
    for number in range(1, count + 1):
        client.create_model_version("demo", source, run_id, tags={"pedigree.policy": str(number)})


@pytest.mark.slow
def test_registered_champion_loads_generates_and_chats(registered: Registered, policy: Path, tmp_path: Path):
    """The registered model generates the same as plain transformers from the policy's folder."""
    done = subprocess.run(
        [sys.executable, "-c", USE_MODEL, registered.uri, str(policy)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["same"]
    assert loaded["dtype"] == "torch.bfloat16"
    answer = loaded["answer"]
    assert (answer["object"], answer["model"]) == ("chat.completion", "demo")
    assert answer["usage"]["prompt_tokens"] == loaded["prompt_tokens"]
    assert 1 <= answer["usage"]["completion_tokens"] <= 8
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_register_links_the_weights_and_keeps_their_identity(registered: Registered, policy: Path):
    folder = registered.registry.resolve("models:/demo@champion")
    shards = sorted(policy.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [shard.name for shard in shards]
    assert all(shard.samefile(folder / shard.name) for shard in shards)
    assert weights_identity(folder) == weights_identity(policy)


def test_register_files_contain_no_local_path(registered: Registered, policy: Path):
    folder = registered.registry.resolve("models:/demo@champion").parent
    texts = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert {"MLmodel", "requirements.txt", "chat_template.jinja"} <= {path.name for path in texts}
    assert [path for path in texts if str(policy) in path.read_text() or str(folder) in path.read_text()] == []
    assert [path.name for path in folder.parent.iterdir()] == ["artifacts"], "temporary files are removed"


def test_registered_version_has_a_logged_model_with_metrics_data_and_card(
    uri: str, tracker: Tracker, registry: Registry, policy: Path, packaged_here: None
) -> None:
    """The run keeps one point for each metric. The rest is what MLflow itself returns."""
    client, run_id = MlflowClient(uri), new_run(tracker)
    client.log_metric(run_id, "eval/loss", 0.5, step=9)
    client.log_metric(run_id, "loss", 0.7, step=9)
    version = registry.register("demo.v1", policy, run_id, identity=IDENTITY, tags={}, card="# A card\n")
    [model] = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    assert (model.name, model.status, model.source_run_id) == ("demo_v1", "READY", run_id)
    assert [(m.key, m.value, m.step, m.dataset_name) for m in model.metrics] == [
        ("eval/loss", 0.5, 9, "held-out pairs")
    ]
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "demo.v1", "version": 1}]
    assert version.source == model.artifact_location
    assert len(client.get_metric_history(run_id, "eval/loss")) == 1
    assert [output.model_id for output in client.get_run(run_id).outputs.model_outputs] == [model.model_id]
    assert (registry.folder(version) / "README.md").read_text() == "# A card\n"
    registry.describe(version, "**Not champion**")
    assert client.get_model_version("demo.v1", "1").description == "**Not champion**"


@pytest.mark.usefixtures("packaged_here")
def test_register_two_versions_of_one_run_have_separate_files(registered: Registered, policy: Path, tmp_path: Path):
    """The second has another tokenizer.

    Registered again after its tag was lost, it is not packaged: the policy's folder is missing.
    """
    other = shutil.copytree(policy, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors*"))
    (other / "chat_template.jinja").write_text("{#- another #}" + (policy / "chat_template.jinja").read_text())
    registry, identity = registered.registry, {"pedigree.policy": "c" * 64}
    second = registry.register("demo", policy, registered.run_id, identity=identity, tags={}, tokenizer=other)
    folders = {number: registry.resolve(f"models:/demo/{number}") for number in (1, second.number)}
    for number, tokenizer in ((1, policy), (second.number, other)):
        template = (tokenizer / "chat_template.jinja").read_bytes()
        assert (folders[number] / "chat_template.jinja").read_bytes() == template
        assert (folders[number].parent / "components/tokenizer/chat_template.jinja").read_bytes() == template
    for shard in policy.glob("*.safetensors"):
        assert all(shard.samefile(folder / shard.name) for folder in folders.values())
    MlflowClient(registered.uri).delete_model_version_tag("demo", str(second.number), "pedigree.policy")
    package = folders[second.number].parent
    inode = package.stat().st_ino
    again = registry.register("demo", policy / "none", registered.run_id, identity=identity, tags={})
    assert (again.number, again.source, package.stat().st_ino) == (second.number + 1, second.source, inode)


def test_resolve_model_folder_has_its_tokenizer(registered: Registered, policy: Path):
    folder = registered.registry.resolve("models:/demo/1")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (policy / name).read_bytes()


def test_register_again_returns_the_version_with_its_lineage(registered: Registered, policy: Path):
    """The second call would fail if it packaged anything: its folder does not exist."""
    assert registered.version.tags == {**IDENTITY, "pedigree.tokenized_pairs": "b" * 64}
    assert registered.version.number == 1
    again = registered.registry.register("demo", policy / "none", registered.run_id, identity=IDENTITY, tags={})
    assert again.number == 1
    assert registered.registry.find_version("demo", IDENTITY) == registered.registry.champion("demo")
    assert registered.registry.find_version("demo", {"pedigree.policy": "f" * 64}) is None


def test_register_folder_without_model_raises_with_the_cause(registry: Registry, tracker: Tracker, tmp_path: Path):
    (tmp_path / "broken").mkdir()
    run_id = new_run(tracker)
    with pytest.raises(RegistryError, match=r"broken.*config\.json.*\[packaging-failed\]"):
        registry.register("demo", tmp_path / "broken", run_id, identity=IDENTITY, tags={})
    assert registry.find_version("demo", IDENTITY) is None


def test_find_version_returns_the_latest_with_all_tags(registry: Registry, uri: str, tracker: Tracker):
    add_versions(tracker, 11)
    for number in (2, 10):
        MlflowClient(uri).set_model_version_tag("demo", str(number), "same", "yes")
    found = registry.find_version("demo", {"same": "yes"})
    assert found is not None and found.number == 10
    assert registry.find_version("demo", {"same": "yes", "pedigree.policy": "2"}).number == 2
    assert registry.tag(found, {"pedigree.reasons": "better"}).tags["pedigree.reasons"] == "better"
    assert registry.find_version("demo", {"pedigree.reasons": "better"}).number == 10


def test_rollback_restores_the_predecessor(registry: Registry, uri: str, tracker: Tracker):
    assert registry.champion("demo") is None
    add_versions(tracker, 3)
    assert registry.champion("demo") is None
    versions = sorted(registry.versions(), key=lambda version: version.number)
    for number in (1, 2, 2, 3):
        registry.nominate(versions[number - 1])
        assert registry.promote(versions[number - 1], over=registry.champion("demo"))
    assert registry.champion("demo").tags[PREVIOUS_TAG] == "2"
    (model := local_path(versions[1].source) / "model").mkdir(parents=True)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"version 2 of demo.*\[version-without-files\]"):
        registry.rollback("demo")
    assert registry.champion("demo").number == 3 and ROLLED_BACK_TAG not in registry.champion("demo").tags
    (model / "config.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"version 2 of demo.*\[version-without-files\]"):
        registry.rollback("demo")
    (model / "model.safetensors").touch()
    assert [version.number for version in registry.rollback("demo")] == [2, 3]
    assert registry.champion("demo").number == 2
    assert registry.find_version("demo", {ROLLED_BACK_TAG: "true"}).number == 3
    for number in (1, 3):  # a nomination replaces no champion
        registry.nominate(versions[number - 1])
    assert [version.number for version in registry.rollback("demo")] == [1, 2]
    with pytest.raises(RegistryError, match=r"demo has no earlier champion: version 1.*\[no-previous-version\]"):
        registry.rollback("demo")
    assert MlflowClient(uri).get_model_version_by_alias("demo", "candidate").version == 3
    assert registry.promote(versions[2], over=registry.champion("demo"))
    MlflowClient(uri).delete_model_version("demo", "1")
    with pytest.raises(RegistryError, match=r"version 1 of demo.*version 3.*\[version-deleted\]"):
        registry.rollback("demo")


def test_rolled_back_version_made_by_hand_is_not_matched(registry: Registry, uri: str, tracker: Tracker):
    """Its weights are unknown, so they cannot equal those of a rolled-back version."""
    add_versions(tracker, 1)
    [known], client = registry.versions(), MlflowClient(uri)
    _, by_hand = (client.create_model_version("demo", known.source).version for _ in "ab")
    for number in (known.number, by_hand - 1):
        client.set_model_version_tag("demo", str(number), ROLLED_BACK_TAG, "true")
    assert registry.rolled_back(known) == "1"
    other = next(version for version in registry.versions() if version.number == by_hand)
    assert other.weights is None and registry.rolled_back(other) is None


def test_promote_over_another_champion_is_refused(registry: Registry, uri: str, tracker: Tracker, tmp_path: Path):
    """A registry of another home promotes a version in between."""
    add_versions(tracker, 3)
    first, second, third = sorted(registry.versions(), key=lambda version: version.number)
    assert not registry.promote(second, over=first), "no champion exists yet"
    assert Registry(uri, tmp_path / "elsewhere").promote(first, over=None)
    assert not registry.promote(second, over=None)
    assert registry.champion("demo").number == 1
    assert registry.promote(second, over=first)
    assert not registry.promote(third, over=first)
    champion = registry.champion("demo")
    assert (champion.number, champion.tags[PREVIOUS_TAG]) == (2, "1")
    assert PREVIOUS_TAG not in registry.find_version("demo", third.tags).tags


@pytest.mark.usefixtures("packaged_here")
def test_register_in_a_separate_registry_keeps_files_with_the_runs(
    uri: str, tracker: Tracker, migrated_database: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The named registry is used, not the one in the environment for MLflow's client."""
    shutil.copy(migrated_database, tmp_path / "models.db")
    models = f"sqlite:///{tmp_path / 'models.db'}"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", models)
    run_id = new_run(tracker)
    elsewhere, beside = Registry(uri, tmp_path / "downloads", models), Registry(uri, tmp_path / "downloads")
    version = elsewhere.register("demo", policy, run_id, identity=IDENTITY, tags={})
    assert elsewhere.promote(version, over=None)
    assert (elsewhere.versions(), beside.versions()) == ([elsewhere.champion("demo")], [])
    assert MlflowClient(models, models).get_model_version("demo", "1").source == version.source
    assert version.source.startswith(MlflowClient(uri).get_experiment_by_name("demo").artifact_location)
    assert elsewhere.has_files(version)
    assert weights_identity(elsewhere.resolve("models:/demo@champion")) == weights_identity(policy)


def test_champion_separate_registry_unavailable_message_has_its_address(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = "http://me:secret@127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", address)
    with pytest.raises(RegistryError, match=r"http://127\.0\.0\.1:9 .*\[registry-unavailable\]") as raised:
        Registry(uri, tmp_path, address).champion("demo")
    assert "MLFLOW_REGISTRY_URI" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_registry_unknown_names_raise_with_the_known_ones(registry: Registry, tracker: Tracker):
    with pytest.raises(UnknownModel, match=r"model demo .*none.*\[unknown-model\]"):
        registry.rollback("demo")
    with pytest.raises(RegistryError, match=r"demo@champion.*\[wrong-model-address\]"):
        registry.resolve("demo@champion")
    with pytest.raises(UnknownModel, match=r"model demo .*\[unknown-model\]"):
        registry.resolve("models:/demo@champion")
    add_versions(tracker, 1)
    with pytest.raises(RegistryError, match=r"demo.*\[no-champion\]"):
        registry.rollback("demo")
    registry.nominate(registry.find_version("demo", {}))
    with pytest.raises(RegistryError, match=r"demo has the alias champion .*candidate.*\[unknown-alias\]"):
        registry.resolve("models:/demo@champion")
    with pytest.raises(RegistryError, match=r"models:/demo/7: .*not found.*\[registry-request\]"):
        registry.resolve("models:/demo/7")
    with pytest.raises(RegistryError, match=r"policy/model .*config\.json.*\[version-without-files\]"):
        registry.resolve("models:/demo/1")


def test_link_or_copy_other_filesystem_copies(tmp_path: Path):
    """/dev/shm is another filesystem than the tests' folder."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as far:
        source, target = Path(far) / "weights", tmp_path / "weights"
        if Path(far).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two filesystems")
        source.write_bytes(b"weights")
        target.write_bytes(b"saved by MLflow")
        link_or_copy(source, target)
        assert target.read_bytes() == b"weights"
        assert not source.samefile(target)


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("file:///home/some%20one/run/artifacts", Path("/home/some one/run/artifacts")),
        ("/home/some%20one/artifacts", Path("/home/some%20one/artifacts")),
        ("mlflow-artifacts:/1/run/artifacts", None),
        ("s3://bucket/run/artifacts", None),
    ],
)
def test_local_path_remote_address_is_none(address: str, path: Path | None):
    assert local_path(address) == path


@pytest.mark.parametrize("cloud", ["s3://bucket", "gs://bucket", "wasbs://box@bucket.example"])
def test_has_files_in_a_cloud_is_true(registry: Registry, cloud: str):
    assert registry.has_files(Version("demo", 1, f"{cloud}/run/artifacts/policy", {}))


@pytest.mark.usefixtures("packaged_here")
def test_register_removes_leftovers_of_a_killed_registration(registered: Registered, policy: Path):
    """A copy of a model for each killed attempt would fill the disk."""
    experiment = MlflowClient(registered.uri).get_experiment_by_name("demo")
    staging = local_path(experiment.artifact_location) / "models" / ".staging"
    (staging / "killed" / "policy").mkdir(parents=True)
    (staging / "killed.lock").touch()
    version = registered.registry.register("again", policy, registered.run_id, identity=IDENTITY, tags={})
    assert list(staging.iterdir()) == []
    # As after a kill between storing the files and making the version.
    MlflowClient(registered.uri).delete_model_version("again", "1")
    (local_path(version.source) / "model" / "half").touch()
    again = registered.registry.register("again", policy, registered.run_id, identity=IDENTITY, tags={})
    model = local_path(again.source) / "model"
    assert again.source == version.source and weights_identity(model) == weights_identity(policy)
    assert not (model / "half").exists() and list(staging.iterdir()) == []


# In a separate mount namespace: a filesystem too small for the package of a policy.
PACKAGE_ON_A_FULL_DISK = """
import subprocess, sys
from pathlib import Path
from model_registry.connection import connect
from model_registry.files import VersionFiles, packaged
from training.contract.errors import StoreError

disk, policy = Path(sys.argv[1]), Path(sys.argv[2])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", disk], stderr=subprocess.PIPE).returncode:
    sys.exit(77)
try:
    with packaged("models:/small", VersionFiles(policy, policy, policy), disk):
        sys.exit("it was packaged on a full disk")
except StoreError as error:
    print(error)
assert list((disk / ".staging").iterdir()) == []
"""


@pytest.mark.slow
def test_packaged_on_a_full_disk_raises_with_path_and_free_bytes(policy: Path, tmp_path: Path):
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", PACKAGE_ON_A_FULL_DISK]
    done = subprocess.run([*command, str(tmp_path), str(policy)], capture_output=True, text=True, timeout=100)
    if (done.returncode == 77 or "unshare" in done.stderr) and os.environ.get("CI") != "true":
        pytest.skip("mounting a small filesystem is not permitted here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"models:/small.* {re.escape(str(tmp_path))} .*[\d,]+ bytes.*No space", done.stdout)


def test_versions_lists_more_than_one_page(registry: Registry, uri: str):
    """MLflow returns 10,000 a page. `pedigree gc` removes artifacts of unlisted versions."""
    client, many = connect(uri), 10_001
    client.create_registered_model("many")
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database, database:
        database.executemany(
            "INSERT INTO model_versions (name, version, creation_time, last_updated_time, source, status, current_stage) "
            "VALUES ('many', ?, 0, 0, '', 'READY', 'None')",
            ((number,) for number in range(1, many + 1)),
        )
    assert sorted(version.number for version in registry.versions()) == list(range(1, many + 1))
