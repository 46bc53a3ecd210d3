"""Models that are only run, whole on each of several real ranks or in shards: the same bits, and one that reads for all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.training.model.test_architectures import VARIANTS, build
from training.contract.job import Job
from training.contract.logprob_table import LogProbTable
from training.contract.store import Artifact, Store
from training.model.load import load_model

CPU, META = torch.device("cpu"), torch.device("meta")
WEIGHTS = "model.safetensors"


def reference_job(world: Any, name: str, **compute: Any) -> Job:
    job: Job = world.job("reference", {"dtype": "float32"}, name, **compute)
    job = job.model_copy(update={"artifact": "reference_logprobs"})
    job.write()
    return job


def scored(world: Any, forker: Any, ranks: int, parallel: str, nodes: int = 1) -> tuple[Job, Artifact]:
    job = reference_job(world, f"{parallel}-{ranks}", parallel=parallel)
    assert set(forker.run(job, ranks, nodes)) == {0}, job.log.read_text()[-3000:]
    found = Store(job.store).find("reference_logprobs", job.derivation.key)
    assert found is not None
    return job, found


def notes(job: Job) -> list[str]:
    return [e["text"] for e in map(json.loads, job.events.read_text().splitlines()) if e["event"] == "note"]


def memo_keys(job: Job) -> np.ndarray:
    return np.concatenate([load_file(file)["keys"] for file in (job.store / "memo").glob("*/*/index.safetensors")])


@pytest.mark.slow
def test_the_reference_pass_in_shards_gives_the_same_bits(tmp_path: Path, world_builder: Any, forker: Any):
    """90 sequences of some 600 tokens are one batch: the other ranks run it for company, and store nothing of it."""
    world = world_builder(tmp_path)
    _, alone = scored(world, forker, 1, "auto")
    for ranks, parallel, nodes, says in (
        (2, "fsdp", 1, "2 processes, weights in 2 shards, 1 times (fsdp: as the recipe says)"),
        (3, "fsdp", 1, "3 processes, weights in 3 shards, 1 times (fsdp: as the recipe says)"),
        (4, "hsdp", 2, "4 processes, weights in 2 shards, 2 times (hsdp: as the recipe says)"),
        (2, "auto", 1, "2 processes, weights whole on each (ddp: scoring takes 0.00 GiB beside activations"),
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
def test_what_no_config_or_file_tells_arrives_as_well(tmp_path: Path, world_builder: Any, forker: Any, model: str):
    world = world_builder(tmp_path, train=6, validation=2)
    MODELS[model](world)
    _, found = scored(world, forker, 2, "fsdp")
    table = LogProbTable.read(found.folder, len(world.examples))
    plain = AutoModelForCausalLM.from_pretrained(world.model).eval()
    expected = [float(world.plain_logprob(plain, example, "chosen").detach()) for example in world.examples]
    np.testing.assert_allclose(table.chosen_logprobs, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_rank_0_refuses_stops_every_rank(tmp_path: Path, world_builder: Any, forker: Any, parallel: str):
    """None waits for the one that read the files, and each gives the cause, which only that one has seen."""
    world = world_builder(tmp_path, train=4, validation=2)
    tensors = load_file(world.model / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, world.model / WEIGHTS, metadata={"format": "pt"})
    job = reference_job(world, "broken", parallel=parallel)
    assert forker.run(job, 3) == [1, 1, 1]
    cause = f"ModelError: the weights in {world.model} do not fit its config.json: missing keys: model.norm.weight (1)"
    assert job.log.read_text().count(cause) == 3
    failure = json.loads(job.error.read_text())
    assert f"{failure['type']}: {failure['message']}" == cause


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "variant", "fields"), VARIANTS, ids=[f"{v[0]}-{v[1]}" for v in VARIANTS])
def test_the_form_is_that_of_the_model(tmp_path: Path, kind: str, variant: str, fields: dict[str, Any], dtype: str):
    """Names and shapes, and that a rank without numbers has made none: what the ranks rely on when they exchange tensors."""
    build(kind, fields).save_pretrained(tmp_path)
    model, form = (load_model(tmp_path, dtype, device) for device in (CPU, META))
    assert shapes(form) == shapes(model)
    assert {tensor.device for tensor in [*form.parameters(), *form.buffers()]} == {META}
    assert not form.training


def shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.shape for name, tensor in named}
