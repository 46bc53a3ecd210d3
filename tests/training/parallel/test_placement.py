"""Models that only score, complete on each of several real ranks or in shards: same bits, and only rank 0 reads files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.training.model.architectures import MULTIMODAL, VARIANTS, build, build_multimodal
from tests.training.runs import losses, published, told
from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.config.training import SupervisedTuning, Training
from training.contract.errors import ModelError
from training.contract.protocol.job import Input, Job
from training.contract.protocol.locations import PolicyLocations
from training.contract.store.artifact import Artifact
from training.contract.store.logprob_table import LogProbTable
from training.model.load import load_model, named_tensors
from training.parallel.placement import _check_same_tensors, _TensorInfo

CPU, META = torch.device("cpu"), torch.device("meta")
WEIGHTS = "model.safetensors"


def reference_job(inputs: Any, name: str, **compute: Any) -> Job:
    job: Job = inputs.job("reference", {"dtype": "float32"}, name, **compute)
    job = job.model_copy(update={"artifact": "reference_logprobs"})
    job.write()
    return job


def scored(inputs: Any, forker: Any, ranks: int, parallel: str, nodes: int = 1) -> tuple[Job, Artifact[Any]]:
    job = reference_job(inputs, f"{parallel}-{ranks}", parallel=parallel)
    return job, published(job, forker.run(job, ranks, nodes))


def notes(job: Job) -> list[str]:
    return [e["text"] for e in told(job, "note")]


def cache_keys(job: Job) -> np.ndarray:
    return np.concatenate([load_file(file)["keys"] for file in (job.store / "memo").glob("*/*/index.safetensors")])


@pytest.mark.slow
def test_reference_log_probs_in_shards_have_the_same_bits(tmp_path: Path, forker: Any):
    """The 90 sequences, about 600 tokens, are one batch. The other ranks run it as padding, and store nothing."""
    inputs = build_tiny_inputs(tmp_path)
    _, alone = scored(inputs, forker, 1, "auto")
    for ranks, parallel, nodes, note in (
        (2, "fsdp", 1, "2 processes, weights in 2 shards, 1 copies (fsdp: "),
        (3, "fsdp", 1, "3 processes, weights in 3 shards, 1 copies (fsdp: "),
        (4, "hsdp", 2, "4 processes, weights in 2 shards, 2 copies (hsdp: "),
        (2, "auto", 1, "2 processes, weights complete on each (ddp: scoring takes 0.00 GiB"),
    ):
        job, found = scored(inputs, forker, ranks, parallel, nodes)
        assert found.fingerprint == alone.fingerprint, parallel
        assert any(text.startswith(note) for text in notes(job)), notes(job)
        keys = cache_keys(job)
        assert len(keys) == len(np.unique(keys, axis=0)) == 90


def write_untied_head(inputs: Any) -> None:
    """Write another head into the file, and keep the config with tied embeddings. transformers loads the head of the file."""
    tensors = load_file(inputs.model / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, inputs.model / WEIGHTS, metadata={"format": "pt"})


def another_architecture(kind: str) -> Callable[[Any], None]:
    def replace(inputs: Any) -> None:
        variant = next(fields for name, _, fields in VARIANTS if name == kind)
        (inputs.model / WEIGHTS).unlink()
        build(kind, variant).save_pretrained(inputs.model)

    return replace


# Buffers that no file contains (rotary frequencies of two kinds, a scale of embeddings), experts, and layers of Conv1D.
MODELS = {"a head of its own": write_untied_head} | {
    kind: another_architecture(kind) for kind in ("gemma3_text", "qwen2_moe", "gpt2")
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_buffers_and_untied_heads_are_broadcast_too(tmp_path: Path, forker: Any, model: str):
    inputs = build_tiny_inputs(tmp_path, train=6, validation=2)
    MODELS[model](inputs)
    _, found = scored(inputs, forker, 2, "fsdp")
    table = LogProbTable.read(found.folder, len(inputs.examples))
    plain = AutoModelForCausalLM.from_pretrained(inputs.model).eval()
    expected = [float(inputs.plain_logprob(plain, example, "chosen").detach()) for example in inputs.examples]
    np.testing.assert_allclose(table.logprobs_P2[:, 0], expected, atol=1e-4)


@pytest.mark.slow
def test_all_ranks_train_the_same_tensors(tmp_path: Path, forker: Any):
    """Ernie's code freezes a bias of its experts. transformers unfreezes loaded tensors, and only rank 0 loads."""
    inputs = build_tiny_inputs(tmp_path, train=8, validation=2)
    another_architecture("ernie4_5_moe")(inputs)
    alone, together = (tuned(inputs, forker, ranks, "ddp") for ranks in (1, 2))
    assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_ranks_with_unequal_numbers_of_rows_run_the_same_number(tmp_path: Path, forker: Any):
    """A model that cannot share prefixes runs each sequence in a row of its own, and each row is a collective. Five sequences
    per step are three rows on one rank and two on the other."""
    inputs = build_tiny_inputs(tmp_path, train=20, validation=2)
    (inputs.model / WEIGHTS).unlink()
    build("stablelm", {}).save_pretrained(inputs.model)
    alone, together = (tuned(inputs, forker, ranks, "fsdp") for ranks in (1, 2))
    assert together == pytest.approx(alone, abs=1e-5)


def tuned(inputs: Any, forker: Any, ranks: int, parallel: str) -> list[float]:
    """Return the losses of an epoch of supervised tuning."""
    settings = SupervisedTuning.model_validate({"epochs": 1, "batch_size": 5}).model_dump(mode="json")
    job = inputs.job("sft", settings, f"{parallel}-{ranks}", parallel=parallel)
    published(job, forker.run(job, ranks))
    found = losses(job)
    assert len(found) == math.ceil(len(inputs.split("train")) / 5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_load_error_of_rank_0_stops_every_rank(tmp_path: Path, forker: Any, parallel: str):
    """All ranks report the error of rank 0; none waits for it."""
    inputs = build_tiny_inputs(tmp_path, train=4, validation=2)
    tensors = load_file(inputs.model / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, inputs.model / WEIGHTS, metadata={"format": "pt"})
    job = reference_job(inputs, "broken", parallel=parallel)
    assert forker.run(job, 3) == [1, 1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "ModelError"
    assert failure["message"].endswith("missing keys: model.norm.weight (1) [weights-mismatch]")
    assert str(inputs.model) in failure["message"]
    assert job.log.read_text().count(f"ModelError: {failure['message']}") == 3


def test_a_model_with_other_tensors_than_its_config_raises():
    """Otherwise a rank would wait forever for missing tensors, or mistake one tensor for another."""
    built = [_TensorInfo(name, name, "float32", shape, True) for name, shape in (("a", [2]), ("b", [3, 1]), ("c", [4]))]
    read = {"a": built[0], "b": built[1]._replace(shape=[1, 3]), "d": built[2]}
    with pytest.raises(ModelError, match=r" 3 tensors, among them b, c, d; .* \[tensors-differ\]"):
        _check_same_tensors(built, read)
    _check_same_tensors(built, {info.name: info for info in built})


@pytest.mark.slow
def test_an_adapter_scored_in_shards_gives_the_same_bits(tiny_inputs: Any, forker: Any):
    """In the job that scores single pairs again."""
    adapter = {"rank": 2, "target_modules": ["q_proj", "down_proj", "lm_head"], "export": "adapter"}
    fields = {"batch_size": 8, "max_steps": 3, "optimizer": {"learning_rate": 1e-2}, "adapter": adapter}
    training = tiny_inputs.job("policy", Training.model_validate(fields).model_dump(mode="json"), "training")
    trained = published(training, forker.run(training))
    policy = Input(kind="policy", fingerprint=trained.fingerprint, folder=trained.folder)
    artifacts = []
    for ranks, parallel in ((1, "auto"), (3, "fsdp")):
        job = tiny_inputs.job("proof", {"rows": 45}, f"{parallel}-{ranks}", parallel=parallel)
        job = job.model_copy(update={"artifact": "proof", "inputs": job.inputs | {"policy": policy}})
        job.write()
        artifacts.append(published(job, forker.run(job, ranks)))
    assert artifacts[0].fingerprint == artifacts[1].fingerprint
    rows = artifacts[0].json("rescored.json")
    assert max(abs(row["chosen"]["live"] - row["chosen"]["stored"]) for row in rows) > 0.1, "differs from its base"


@pytest.mark.slow
def test_training_from_a_champion_in_shards_gives_the_same_losses(tmp_path: Path, forker: Any):
    """The reference check loads the reference model beside the champion. `ld_alpha` needs tokens that the cache lacks."""
    inputs, other = build_tiny_inputs(tmp_path / "one"), tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(other)
    loss = {"beta": 0.5, "ld_alpha": 0.3}
    fields = {"loss": loss, "batch_size": 8, "max_steps": 4, "start_from": "champion"}
    settings = Training.model_validate(fields).model_dump(mode="json") | {"champion": "c" * 64}
    found = []
    for ranks, parallel in ((1, "auto"), (2, "fsdp")):
        job = inputs.job("policy", settings, f"{parallel}-{ranks}", parallel=parallel)
        job = job.model_copy(update={"locations": PolicyLocations(champion=other)})
        job.write()
        found.append(losses(published(job, forker.run(job, ranks))))
        assert any("tokens of 90 sequences" in text for text in notes(job))
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], abs=1e-5)
    assert found[0][0] != pytest.approx(np.log(2), abs=1e-3)


@pytest.mark.parametrize(
    ("maker", "kind", "fields"),
    [pytest.param(build, k, c, id=f"{k}-{v}") for k, v, c in VARIANTS]
    + [pytest.param(build_multimodal, k, c, id=f"{k}-{v}") for k, v, c in MULTIMODAL],
)
def test_a_model_on_the_meta_device_has_the_same_tensors(tmp_path: Path, maker: Any, kind: str, fields: dict[str, Any]):
    """Names, shapes and dtypes are the same, because ranks exchange tensors by them. The meta model lacks values."""
    maker(kind, fields).save_pretrained(tmp_path)
    model, meta_model = (load_model(tmp_path, "bfloat16", device) for device in (CPU, META))
    assert shapes_and_dtypes(meta_model) == shapes_and_dtypes(model)
    assert {tensor.device for tensor in [*meta_model.parameters(), *meta_model.buffers()]} == {META}
    assert not meta_model.training
    assert any(type(part).__name__ in model._no_split_modules for part in model.modules()), "it has layers to gather"


def shapes_and_dtypes(model: PreTrainedModel) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(model)}
