"""A recipe whose policy is an adapter: run, release, and every command that reads such a policy."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow.transformers
import pytest
import torch
from mlflow import MlflowClient
from peft import PeftModel
from transformers import AutoModelForCausalLM

from assets.pipeline.graph import GRAPH
from model_registry.model_version import ROLLED_BACK_TAG
from tests.factories import write_inputs
from tests.workflows.homes import check_values, write_recipe
from tests.workflows.in_process import Baseline, run_in
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.identity.model_identity import weights_identity
from training.contract.store.artifact import Artifact
from training.data.tokenization.pair_dataset import Pairs
from workflows.commands.gc import collect
from workflows.commands.inspect_pair import inspect_row
from workflows.commands.run import materialize
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

ADAPTER = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj", "lm_head"], "export": "adapter"}
ADAPTED: dict[str, Any] = {
    **PLAIN,
    "training": {**PLAIN["training"], "adapter": ADAPTER, "optimizer": {"learning_rate": 1e-2}},
    "release": {"model_name": "adapted"},
}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with run_in(tmp_path_factory.mktemp("adapted"), {"adapted": ADAPTED}) as made:
        yield made


@pytest.fixture
def policy(baseline: Baseline) -> Artifact[Any]:
    return baseline.services.store.open("policy", baseline.fingerprints["adapted"]["policy"])


@pytest.fixture
def peft_model(baseline: Baseline, policy: Artifact[Any]) -> torch.nn.Module:
    """Load base and adapter with peft, without this program."""
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(baseline.folders["adapted"] / "base"), policy.folder
    )


def test_the_policy_is_a_few_small_files_and_learned_something(baseline: Baseline, policy: Artifact[Any]):
    names = policy.manifest.files.keys()
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "recipe.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    evaluation = baseline.services.store.open("evaluation", baseline.fingerprints["adapted"]["evaluation"])
    assert evaluation.json("metrics.json")["eval/loss"] != pytest.approx(0.693147, abs=1e-4)


def test_a_second_run_computes_nothing(baseline: Baseline):
    loaded = load_recipe(baseline.folders["adapted"])
    assert {asset.state for asset in status(loaded.pipeline, baseline.services, baseline.instance)} == {"fresh"}
    report = materialize(loaded, baseline.services, baseline.instance)
    assert {asset.outcome for asset in report.assets} == {"reused"} and len(report.assets) == len(GRAPH)


def test_the_champion_is_a_plain_model_that_answers_as_base_and_adapter_do(
    baseline: Baseline, peft_model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", baseline.services.registry.tracking_uri)
    model = mlflow.transformers.load_model("models:/adapted@champion").model.float().eval()
    assert type(model).__name__ == "LlamaForCausalLM" and not any(
        "lora" in name for name, _ in model.named_parameters()
    )
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, peft_model.eval()(ids).logits, atol=2e-5, rtol=0)


def test_it_is_verified(baseline: Baseline):
    found = verify(load_recipe(baseline.folders["adapted"]).pipeline, baseline.services, baseline.instance, rows=2)
    assert found.ok and len(found.artifacts) == len(GRAPH), found


def test_verify_reports_a_version_with_other_weights(baseline: Baseline):
    pipeline, registry = load_recipe(baseline.folders["adapted"]).pipeline, baseline.services.registry
    file = registry.resolve("models:/adapted@champion") / "model.safetensors"
    content = file.read_bytes()
    try:
        file.unlink()  # a hard link to the store's file
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        [fault] = [a.fault for a in verify(pipeline, baseline.services, baseline.instance, rows=0).artifacts if a.fault]
    finally:
        file.write_bytes(content)
    check_values(fault, "version 1 of adapted", " weights ")


def test_inspect_scores_a_pair_with_base_and_adapter(baseline: Baseline, peft_model: torch.nn.Module):
    pipeline = load_recipe(baseline.folders["adapted"]).pipeline
    pairs = Pairs.open(
        baseline.services.store.open("tokenized_pairs", baseline.fingerprints["adapted"]["tokenized_pairs"]).folder
    )
    at = int(pairs.indices("train")[0])
    found = inspect_row(pipeline, baseline.services, baseline.instance, int(pairs.rows[at]), score=True)
    sequence = pairs.sequence(at, "chosen")
    with torch.no_grad():
        logps = peft_model.eval()(sequence.ids_T[None]).logits[0, :-1].log_softmax(-1)
    exact = logps.gather(1, sequence.ids_T[1:, None])[:, 0][sequence.mask_T[1:]].sum()
    assert found.chosen.policy_logprob == pytest.approx(float(exact), abs=1e-3)


def test_gc_keeps_the_lineage_of_the_version(baseline: Baseline):
    kinds = {item.kind for item in collect(baseline.services, baseline.instance).garbage}
    assert kinds <= {"proof", "job"}


def test_missing_files_of_the_champion_are_restored_merged(baseline: Baseline):
    registry = baseline.services.registry
    merged = weights_identity(registry.resolve("models:/adapted@champion")).fingerprint
    shutil.rmtree(baseline.home / "mlflow" / "artifacts")
    assert materialize(load_recipe(baseline.folders["adapted"]), baseline.services, baseline.instance).succeeded
    assert weights_identity(registry.resolve("models:/adapted@champion")).fingerprint == merged


def spoil(file: Path, content: bytes) -> None:
    file.unlink()  # a hard link to the store's file
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_champion_is_a_reference_for_another_recipe(baseline: Baseline, tmp_path: Path):
    later = {**ADAPTED, "reference": {"model": "models:/adapted@champion"}, "release": {"model_name": "later"}}
    folder = write_recipe(tmp_path / "later", later)
    write_inputs(folder)
    loaded = load_recipe(folder)
    report = materialize(loaded, baseline.services, baseline.instance)
    assert report.succeeded, report
    made = {asset.asset: asset.fingerprint for asset in report.assets}
    champion = baseline.services.registry.resolve("models:/adapted@champion")
    assert made["reference_model"] == weights_identity(champion).fingerprint
    file = champion / "model.safetensors"
    content = file.read_bytes()
    spoil(file, content)
    assert materialize(loaded, baseline.services, baseline.instance).succeeded and file.read_bytes() == content
    spoil(file, content)
    merged = baseline.services.store.folder("merged_policy", made["reference_model"])
    merged.rename(merged.with_name("elsewhere"))
    try:
        failed = materialize(loaded, baseline.services, baseline.instance)
    finally:
        merged.with_name("elsewhere").rename(merged)
        file.write_bytes(content)
    [error] = [asset.error for asset in failed.assets if asset.outcome == "failed"]
    message = r"version 1 of adapted in .* \w{12}, .* \w{12}.*\[version-files-differ\]$"
    assert re.search(message, error), error


def test_policy_rolled_back_as_an_adapter_does_not_return_merged(baseline: Baseline):
    """Merging before the release or before publication gives the same weights. A user has rolled them back."""
    registry, folder = baseline.services.registry, baseline.folders["adapted"]
    version = registry.tag(registry.champion("adapted"), {ROLLED_BACK_TAG: "true"})
    MlflowClient(registry.tracking_uri).delete_registered_model_alias("adapted", "champion")
    write_recipe(folder, {**ADAPTED, "training": {**ADAPTED["training"], "adapter": {**ADAPTER, "export": "merged"}}})
    report = materialize(load_recipe(folder), baseline.services, baseline.instance)
    assert version.weights in {asset.fingerprint for asset in report.assets if asset.asset == "policy"}
    assert (report.model_version, report.is_champion, registry.champion("adapted")) == ("2", False, None)
    assert re.match("its policy .*version 1, .*rolled back.*; ", report.reasons or "")
