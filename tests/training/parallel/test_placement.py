"""Models that are only run, whole on each of several real ranks or in shards: the same bits, and one that reads for all."""

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
from tests.training.worlds import build_world
from training.contract.config.recipe import SupervisedTuning, Training
from training.contract.errors import ModelError
from training.contract.protocol.job import Input, Job
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Artifact
from training.model.load import load_model, named_tensors
from training.parallel.placement import _check_same_tensors, _TensorInfo

CPU, META = torch.device("cpu"), torch.device("meta")
WEIGHTS = "model.safetensors"


def reference_job(world: Any, name: str, **compute: Any) -> Job:
    job: Job = world.job("reference", {"dtype": "float32"}, name, **compute)
    job = job.model_copy(update={"artifact": "reference_logprobs"})
    job.write()
    return job


def scored(world: Any, forker: Any, ranks: int, parallel: str, nodes: int = 1) -> tuple[Job, Artifact]:
    job = reference_job(world, f"{parallel}-{ranks}", parallel=parallel)
    return job, published(job, forker.run(job, ranks, nodes))


def notes(job: Job) -> list[str]:
    return [e["text"] for e in told(job, "note")]


def memo_keys(job: Job) -> np.ndarray:
    return np.concatenate([load_file(file)["keys"] for file in (job.store / "memo").glob("*/*/index.safetensors")])


@pytest.mark.slow
def test_the_reference_pass_in_shards_gives_the_same_bits(tmp_path: Path, forker: Any):
    """90 sequences of some 600 tokens are one batch: the other ranks run it for company, and store nothing of it."""
    world = build_world(tmp_path)
    _, alone = scored(world, forker, 1, "auto")
    for ranks, parallel, nodes, says in (
        (2, "fsdp", 1, "2 processes, weights in 2 shards, 1 times (fsdp: as the recipe says)"),
        (3, "fsdp", 1, "3 processes, weights in 3 shards, 1 times (fsdp: as the recipe says)"),
        (4, "hsdp", 2, "4 processes, weights in 2 shards, 2 times (hsdp: as the recipe says)"),
        (2, "auto", 1, "2 processes, weights whole on each (ddp: scoring takes 0.00 GiB besides activations"),
    ):
        job, found = scored(world, forker, ranks, parallel, nodes)
        assert found.fingerprint == alone.fingerprint, parallel
        assert any(text.startswith(says) for text in notes(job)), notes(job)
        keys = memo_keys(job)
        assert len(keys) == len(np.unique(keys, axis=0)) == 90


def other_head(world: Any) -> None:
    """Config and architecture say that the head is the embeddings; the file holds another one, and that is what loads."""
    tensors = load_file(world.model / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, world.model / WEIGHTS, metadata={"format": "pt"})


def another_architecture(kind: str) -> Callable[[Any], None]:
    def replace(world: Any) -> None:
        variant = next(fields for name, _, fields in VARIANTS if name == kind)
        (world.model / WEIGHTS).unlink()
        build(kind, variant).save_pretrained(world.model)

    return replace


# Buffers that are in no file (rotary frequencies of two kinds, a scale of embeddings), experts, and layers of Conv1D.
MODELS = {"a head of its own": other_head} | {
    kind: another_architecture(kind) for kind in ("gemma3_text", "qwen2_moe", "gpt2")
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_what_no_config_or_file_tells_arrives_as_well(tmp_path: Path, forker: Any, model: str):
    world = build_world(tmp_path, train=6, validation=2)
    MODELS[model](world)
    _, found = scored(world, forker, 2, "fsdp")
    table = LogProbTable.read(found.folder, len(world.examples))
    plain = AutoModelForCausalLM.from_pretrained(world.model).eval()
    expected = [float(world.plain_logprob(plain, example, "chosen").detach()) for example in world.examples]
    np.testing.assert_allclose(table.logprobs_P2[:, 0], expected, atol=1e-4)


@pytest.mark.slow
def test_what_an_architecture_freezes_every_rank_takes_for_the_same(tmp_path: Path, forker: Any):
    """Ernie's own code freezes a bias of its experts, and transformers thaws what it loads, which rank 0 alone does."""
    world = build_world(tmp_path, train=8, validation=2)
    another_architecture("ernie4_5_moe")(world)
    alone, together = (tuned(world, forker, ranks, "ddp") for ranks in (1, 2))
    assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_ranks_with_unequally_many_rows_run_equally_many(tmp_path: Path, forker: Any):
    """A model that cannot share prefixes runs each sequence in a row of its own, and each row is an exchange: five sequences
    a step are three rows on one rank and two on the other."""
    world = build_world(tmp_path, train=20, validation=2)
    (world.model / WEIGHTS).unlink()
    build("stablelm", {}).save_pretrained(world.model)
    alone, together = (tuned(world, forker, ranks, "fsdp") for ranks in (1, 2))
    assert together == pytest.approx(alone, abs=1e-5)


def tuned(world: Any, forker: Any, ranks: int, parallel: str) -> list[float]:
    """The losses of an epoch of supervised tuning."""
    settings = SupervisedTuning.model_validate({"epochs": 1, "batch_size": 5}).model_dump(mode="json")
    job = world.job("sft", settings, f"{parallel}-{ranks}", parallel=parallel)
    published(job, forker.run(job, ranks))
    found = losses(job)
    assert len(found) == math.ceil(len(world.split("train")) / 5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_rank_0_refuses_stops_every_rank(tmp_path: Path, forker: Any, parallel: str):
    """None waits for the one that read the files, and each gives the cause, which only that one has seen."""
    world = build_world(tmp_path, train=4, validation=2)
    tensors = load_file(world.model / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, world.model / WEIGHTS, metadata={"format": "pt"})
    job = reference_job(world, "broken", parallel=parallel)
    assert forker.run(job, 3) == [1, 1, 1]
    cause = f"ModelError: the weights in {world.model} do not fit its config.json: missing keys: model.norm.weight (1)"
    assert job.log.read_text().count(cause) == 3
    failure = json.loads(job.error.read_text())
    assert f"{failure['type']}: {failure['message']}" == cause


def test_a_model_that_its_config_does_not_describe_is_refused():
    """Else a rank would wait for ever for what it did not build, or take it for something else."""
    built = [_TensorInfo(name, name, "float32", shape, True) for name, shape in (("a", [2]), ("b", [3, 1]), ("c", [4]))]
    read = {"a": built[0], "b": built[1]._replace(shape=[1, 3]), "d": built[2]}
    with pytest.raises(ModelError, match="differ in 3 tensors, among them b, c, d; such a model cannot be loaded"):
        _check_same_tensors(built, read)
    _check_same_tensors(built, {info.name: info for info in built})


@pytest.mark.slow
def test_an_adapter_on_its_base_is_scored_in_shards(tiny_world: Any, forker: Any):
    """The job by which single pairs are scored again, with a policy that is an adapter: the same bits as alone."""
    adapter = {"rank": 2, "target_modules": ["q_proj", "down_proj", "lm_head"], "export": "adapter"}
    fields = {"batch_size": 8, "max_steps": 3, "optimizer": {"learning_rate": 1e-2}, "adapter": adapter}
    training = tiny_world.job("policy", Training.model_validate(fields).model_dump(mode="json"), "training")
    trained = published(training, forker.run(training))
    policy = Input(kind="policy", fingerprint=trained.fingerprint, folder=trained.folder)
    made = []
    for ranks, parallel in ((1, "auto"), (3, "fsdp")):
        job = tiny_world.job("proof", {"rows": 45}, f"{parallel}-{ranks}", parallel=parallel)
        job = job.model_copy(update={"artifact": "proof", "inputs": job.inputs | {"policy": policy}})
        job.write()
        made.append(published(job, forker.run(job, ranks)))
    assert made[0].fingerprint == made[1].fingerprint
    rows = made[0].json("rescored.json")
    assert max(abs(row["chosen"]["live"] - row["chosen"]["stored"]) for row in rows) > 0.1, "it is not its base"


@pytest.mark.slow
def test_a_champion_and_the_reference_beside_it_are_in_shards(tmp_path: Path, forker: Any):
    """The proof needs the reference model, which is not where training starts; and `ld_alpha` tokens that no memo has."""
    world, other = build_world(tmp_path / "one"), tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(world.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(other)
    loss = {"beta": 0.5, "ld_alpha": 0.3}
    fields = {"loss": loss, "batch_size": 8, "max_steps": 4, "start_from": "champion"}
    settings = Training.model_validate(fields).model_dump(mode="json") | {"champion": "c" * 64}
    found = []
    for ranks, parallel in ((1, "auto"), (2, "fsdp")):
        job = world.job("policy", settings, f"{parallel}-{ranks}", parallel=parallel)
        job = job.model_copy(update={"locations": {"champion": str(other)}})
        job.write()
        found.append(losses(published(job, forker.run(job, ranks))))
        assert any("no longer knows the tokens of 90 sequences" in text for text in notes(job))
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], abs=1e-5)
    assert found[0][0] != pytest.approx(np.log(2), abs=1e-3)


@pytest.mark.parametrize(
    ("maker", "kind", "fields"),
    [pytest.param(build, k, c, id=f"{k}-{v}") for k, v, c in VARIANTS]
    + [pytest.param(build_multimodal, k, c, id=f"{k}-{v}") for k, v, c in MULTIMODAL],
)
def test_the_form_is_that_of_the_model(tmp_path: Path, maker: Any, kind: str, fields: dict[str, Any]):
    """Names, shapes and dtypes, and that a rank without numbers has made none: what ranks rely on in exchanging tensors."""
    maker(kind, fields).save_pretrained(tmp_path)
    model, form = (load_model(tmp_path, "bfloat16", device) for device in (CPU, META))
    assert forms(form) == forms(model)
    assert {tensor.device for tensor in [*form.parameters(), *form.buffers()]} == {META}
    assert not form.training
    assert any(type(part).__name__ in model._no_split_modules for part in model.modules()), "it has layers to gather"


def forms(model: PreTrainedModel) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(model)}
