"""Recipes whose base model also takes images, from run to champion: the parts for images stay unchanged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow.transformers
import pytest
import torch
from safetensors.torch import load_file

from tests.factories import write_inputs
from tests.training.model.architectures import LINEAR, WINDOW, build_multimodal
from tests.workflows.homes import write_recipe
from tests.workflows.in_process import Baseline, run_in
from tests.workflows.question_pairs import VOCABULARY
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.identity.model_identity import weights_identity
from workflows.commands.run import materialize
from workflows.commands.verify import verify
from workflows.recipes.discovery import load_recipe

pytestmark = pytest.mark.slow

ADAPTER = {"rank": 4, "target_modules": ["q_proj", "down_proj"], "export": "adapter"}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "whole": ("qwen3_5", LINEAR, "Qwen3_5ForConditionalGeneration"),
    "adapted": ("mistral3", {"model_type": "ministral3", "sliding_window": WINDOW}, "Mistral3ForConditionalGeneration"),
}
RECIPES: dict[str, dict[str, Any]] = {
    name: {
        **PLAIN,
        "training": {**PLAIN["training"], "optimizer": {"learning_rate": 1e-2}} | training,
        "release": {"model_name": name},
    }
    for name, training in (("whole", {}), ("adapted", {"adapter": ADAPTER}))
}
PROCESSOR = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}}


def write_multimodal_inputs(folder: Path) -> None:
    """Write the usual tokenizer and pairs. The base is a tiny model of the kind that is the recipe's name."""
    write_inputs(folder)
    kind, changes, _ = MODELS[folder.name]
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
    build_multimodal(kind, changes | sizes).save_pretrained(folder / "base")
    (folder / "base" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with run_in(tmp_path_factory.mktemp("multimodal"), RECIPES, write_multimodal_inputs) as made:
        yield made


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_champion_is_the_whole_model_of_which_the_language_model_was_trained(
    baseline: Baseline, name: str, monkeypatch: pytest.MonkeyPatch
):
    base, champion = baseline.folders[name] / "base", baseline.services.registry.resolve(f"models:/{name}@champion")
    before, after = tensors(base), tensors(champion)
    assert before.keys() == after.keys()
    changed = {tensor for tensor in before if not torch.equal(before[tensor], after[tensor])}
    assert changed and all("language_model" in tensor or tensor == "lm_head.weight" for tensor in changed)
    if name == "adapted":
        assert {tensor.rsplit(".", 2)[1] for tensor in changed} == {"q_proj", "down_proj"}
    assert json.loads((champion / "preprocessor_config.json").read_text()) == PROCESSOR
    monkeypatch.setenv("MLFLOW_TRACKING_URI", baseline.services.registry.tracking_uri)
    answers = mlflow.transformers.load_model(f"models:/{name}@champion")
    assert type(answers.model).__name__ == MODELS[name][2]
    assert answers("What is the opposite of hot?", max_new_tokens=3)[0]["generated_text"]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_verified(baseline: Baseline, name: str):
    found = verify(load_recipe(baseline.folders[name]).pipeline, baseline.services, baseline.instance, rows=2)
    assert found.ok, found


def test_the_champion_is_a_reference_for_another_recipe(baseline: Baseline, tmp_path: Path):
    later = {**RECIPES["whole"], "reference": {"model": "models:/whole@champion"}, "release": {"model_name": "later"}}
    folder = write_recipe(tmp_path / "later", later)
    write_inputs(folder)
    report = materialize(load_recipe(folder), baseline.services, baseline.instance)
    assert report.succeeded, report
    made = {asset.asset: asset.fingerprint for asset in report.assets}
    champion = baseline.services.registry.resolve("models:/whole@champion")
    assert made["reference_model"] == weights_identity(champion).fingerprint
