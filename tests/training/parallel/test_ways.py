"""One job in every way that ranks can share it: the losses and the weights are those of one process.

The ranks are real processes that talk over gloo; HSDP has two nodes of two, as the environment tells them.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.training import runs
from tests.training.model.architectures import build
from tests.training.runs import losses, on_two_ranks, published, told
from tests.training.worlds import build_world, write_reference
from training.contract.errors import TrainingError
from training.contract.protocol.events import EventWriter
from training.contract.store.store import Artifact
from training.distributed import Group
from training.jobs.policy import prepare
from training.loop.rank_sync import Flags

pytestmark = pytest.mark.slow


def settings(**changes: Any) -> dict[str, Any]:
    return runs.settings(**{"batch_size": 6, "micro_tokens": 40, "max_steps": 10} | changes)


def weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(artifact.folder / "model.safetensors")
    return found


def distance(left: Artifact, right: Artifact) -> float:
    """The largest difference of two numbers of the weights, which must have the same names and dtypes."""
    ones, others = weights(left), weights(right)
    assert {n: (t.shape, t.dtype) for n, t in ones.items()} == {n: (t.shape, t.dtype) for n, t in others.items()}
    return max(float((tensor.float() - others[name].float()).abs().max()) for name, tensor in ones.items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_way_is_that_of_one_process(tmp_path: Path, forker: Any, tied: bool):
    """A batch of six in rows of 40 tokens is some micro-batches a rank, and the last batch of the epoch has two pairs:
    with four ranks two have nothing, and run another's pair for company where weights are shared. Three ranks have unequal
    parts of a tensor."""
    world = build_world(tmp_path, train=32, validation=5, tied=tied)
    alone = published(job := world.job("policy", settings(), "alone"), forker.run(job))
    for way, ranks, nodes in (("ddp", 2, 1), ("fsdp", 2, 1), ("hsdp", 4, 2)) if tied else (("fsdp", 3, 1),):
        job = world.job("policy", settings(), f"{way}-{ranks}", parallel=way, evaluate_every=5)
        found = published(job, forker.run(job, ranks, nodes))
        assert losses(found) == pytest.approx(losses(alone), abs=1e-5), way
        assert distance(found, alone) < 1e-5, way
        norms = [[e["grad_norm"] for e in told(a)] for a in (found, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5), way
        evaluated = [told(a, "eval")[-1]["eval/loss"] for a in (found, alone)]
        assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-5), way
        configs = [json.loads((a.folder / "config.json").read_text()) for a in (found, alone)]
        assert configs[0] == configs[1], way


LORA = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj", "lm_head"]}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an adapter": ({"adapter": LORA}, {}),
    "pairs that meet each other": ({"loss": {"type": "aot_unpaired", "beta": 0.5}}, {}),
    "weights of pairs": ({"loss": {"beta": 0.5, "weighting": "wpo"}}, {}),
    "activations made again": ({}, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_shards_go_with_every_other_option(tmp_path: Path, forker: Any, option: str):
    """Each of them runs the model, or reaches into it, in a way of its own."""
    world, (training, compute) = build_world(tmp_path), OPTIONS[option]
    alone = published(job := world.job("policy", settings(**training), "alone", **compute), forker.run(job))
    job = world.job("policy", settings(**training), "shards", parallel="fsdp", **compute)
    shards = published(job, forker.run(job, 2))
    assert losses(shards) == pytest.approx(losses(alone), abs=1e-5)
    assert distance(shards, alone) < 1e-5


def test_layers_that_are_left_out_at_random_are_refused_in_shards(tmp_path: Path, forker: Any):
    """Each rank would leave out others, and wait for ever for the gathering of one."""
    world = build_world(tmp_path)
    build("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5}).save_pretrained(world.model)
    job = world.job("policy", settings(disable_dropout=False), "shards", parallel="fsdp")
    assert forker.run(job, 2) == [1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "ModelError"
    assert failure["message"].startswith("OPTForCausalLM leaves out layers at random (`layerdrop`"), "not FSDP's class"


MUON = {"type": "muon", "learning_rate": 3e-3, "weight_decay": 0.1, "adamw": {"learning_rate": 3e-3}}


@pytest.mark.parametrize(("way", "ranks", "machines"), [("ddp", 2, 1), ("ddp", 4, 2), ("fsdp", 2, 1)])
def test_ranks_that_share_muons_work_step_as_torchs_own(
    tmp_path: Path, forker: Any, way: str, ranks: int, machines: int
):
    """One step, whose sums of gradients are the same to the bit; a rank that is alone on its machine takes torch's own."""
    world = build_world(tmp_path)
    one_step = settings(optimizer=MUON, micro_tokens=1000, max_steps=1, max_grad_norm=1e9)
    alone, shared = world.job("policy", one_step, "alone"), world.job("policy", one_step, "shared", parallel=way)
    found = published(shared, forker.run(shared, ranks, machines))
    assert distance(found, published(alone, forker.run(alone, ranks, ranks))) < 1e-7


def test_muon_in_shards_is_muon_over_whole_matrices(tmp_path: Path, forker: Any):
    """After some steps the last bits differ, which bfloat16 and iterations that make small directions large leave at a
    hundredth of the way the weights went; rows made orthogonal by themselves, or momentum lost on the way from three ranks to
    four, would leave another way."""
    world = build_world(tmp_path)
    steps = settings(optimizer=MUON, max_steps=5, max_grad_norm=1e9)
    whole = published(job := world.job("policy", steps, "whole"), forker.run(job))
    first, again = (world.job("policy", steps, "shards", parallel=way) for way in ("fsdp", "hsdp"))
    assert forker.run(first, 3, stop=2) == [1, 1, 1]
    shards = published(again, forker.run(again, 4, 2))
    assert "resumed from the checkpoint of step 3" in [e["text"] for e in told(shards, "note")]
    assert losses(shards) == pytest.approx(losses(whole), abs=1e-3)
    before = load_file(world.model / "model.safetensors")
    went = max(float((tensor - before[name]).abs().max()) for name, tensor in weights(whole).items())
    assert distance(shards, whole) < 0.03 * went


@pytest.mark.parametrize("option", ["all weights", "an adapter"])
def test_bfloat16_is_the_same_in_every_way(tmp_path: Path, forker: Any, option: str):
    """With a pair a row, however many ranks: every rank rounds the same masters, which are float32 and never rounded, and
    gradients are summed in float32. What is left is the order of a sum; it may move a master, and that one bfloat16, over
    the edge of a rounding, which moves a loss by 1e-4. (Rows that hold other pairs round otherwise: a hundredth of a nat.)"""
    changes, way, ranks = {"all weights": ({}, "hsdp", 4), "an adapter": ({"adapter": LORA}, "fsdp", 2)}[option]
    world = build_world(tmp_path)
    fields = settings(precision="bfloat16", micro_tokens=1, max_steps=4, **changes)
    alone, shards = (world.job("policy", fields, name, parallel=way) for name in ("alone", "shards"))
    one, many = published(alone, forker.run(alone)), published(shards, forker.run(shards, ranks, ranks // 2))
    assert losses(many)[0] == pytest.approx(losses(one)[0], abs=1e-12)
    assert losses(many) == pytest.approx(losses(one), abs=3e-4)
    assert weights(many)["model.norm.weight"].dtype == torch.bfloat16
    configs = [json.loads((found.folder / "config.json").read_text()) for found in (one, many)]
    assert configs[0] == configs[1]
    assert (configs[1]["dtype"], configs[1]["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])


EXPERTS = {
    "num_experts": 4,
    "moe_topk": 4,
    "moe_intermediate_size": 16,
}  # all of them: none is taken or left by rounding
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "positions": ("olmo2", {}),
    "routers": ("hunyuan_v1_moe", EXPERTS),
    "states": ("mamba", {"state_size": 4, "time_step_rank": 2}),
}


@pytest.mark.parametrize("kept", MIXED)
def test_what_a_bfloat16_model_keeps_in_float32_stays_so_in_shards(tmp_path: Path, forker: Any, kept: str):
    """Rotary positions, routers of experts, the residual stream; mamba's layers have parts that are named layers as well."""
    kind, changes = MIXED[kept]
    world = build_world(tmp_path, train=8, validation=2)
    (world.model / "model.safetensors").unlink()
    build(kind, changes).save_pretrained(world.model)
    write_reference(world, AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.bfloat16))
    fields, ways = settings(precision="bfloat16", micro_tokens=1, max_steps=2), []
    for way, ranks in (("ddp", 2), ("hsdp", 4) if kept == "routers" else ("fsdp", 2)):
        job = world.job("policy", fields, way, parallel=way)
        ways.append(published(job, forker.run(job, ranks, ranks // 2)))
    assert losses(ways[0])[0] == pytest.approx(losses(ways[1])[0], abs=1e-12)
    assert losses(ways[0]) == pytest.approx(losses(ways[1]), abs=1e-3)
    assert distance(*ways) < 1e-2


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_every_rank_refuses_what_one_met(tmp_path: Path, forker: Any, way: str):
    """A learning rate of 1e30 ruins the weights in step 1."""
    world = build_world(tmp_path)
    job = world.job(
        "policy", settings(optimizer={"learning_rate": 1e30}), parallel=way, checkpoint_every=1, processes_per_node=2
    )
    assert forker.run(job, 2) == [1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "TrainingError"
    assert "step 2: the loss or its gradient is not finite (rank 0, rows 1" in failure["message"]
    assert "; rank 1, rows 1" in failure["message"]
    assert [p.name for p in job.checkpoints.glob("*/*")] == ["step-00000001"]


def test_a_copy_that_runs_for_company_blames_nobody_else(tmp_path: Path):
    """Of five pairs, each in a row of its own, one rank has two; it runs the shortest of all once more, times zero. Where that
    pair's loss is NaN, so is the gradient of either rank; only the pair itself is named, and the rank it belongs to."""
    job = build_world(tmp_path).job("policy", settings(micro_tokens=1, batch_size=5), parallel="fsdp")

    def work(group: Group) -> tuple[list[int], int, str]:
        prepared = prepare(job, group, EventWriter(None))
        batch = prepared.data.batches.batch(1)
        shortest = int(batch[prepared.data.batches.lengths.run_I[batch].argmin()])
        prepared.data.table.logprobs_P2[shortest, 0] = np.nan
        own = [int(part.items[0]) for part in prepared.data.batches.micro_batches(1, group.rank, group.world)]
        with pytest.raises(TrainingError) as refused:
            prepared.trainer.train_step.step(1, Flags())
        return own, shortest, str(refused.value)

    (own_0, shortest, said_0), (own_1, _, said_1) = on_two_ranks(tmp_path, work)
    assert sorted(map(len, (own_0, own_1))) == [2, 3]
    assert said_0 == said_1
    assert f"is not finite (rank {0 if shortest in own_0 else 1}, rows {100 + shortest}); no weight" in said_0


def test_where_only_a_gradient_is_not_finite_all_rows_of_its_rank_are_named(tmp_path: Path):
    job = build_world(tmp_path).job("policy", settings(batch_size=5), parallel="ddp")

    def work(group: Group) -> tuple[list[int], str]:
        prepared = prepare(job, group, EventWriter(None))
        if group.rank == 1:
            next(iter(prepared.params.model.parameters())).register_hook(lambda gradient: gradient * np.nan)
        parts = prepared.data.batches.micro_batches(1, group.rank, group.world)
        with pytest.raises(TrainingError) as refused:
            prepared.trainer.train_step.step(1, Flags())
        return sorted(100 + int(item) for part in parts for item in part.items), str(refused.value)

    (_, said_0), (rows, said_1) = on_two_ranks(tmp_path, work)
    named = re.search(r"\(rank 1, rows ([\d, ]+)\); no weight", said_1)
    assert said_0 == said_1 and named is not None
    assert sorted(map(int, named[1].split(", "))) == rows


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_save_that_fails_on_one_rank_stops_all(tmp_path: Path, forker: Any, way: str):
    """The second of three ranks has no room for its file from step 3 on. All stop with its account, a step after it failed
    to save, and go on from step 2, with the losses of a run that nobody disturbed, once there is room. The save of step
    4 is a later one where that of step 2 takes its time."""
    world = build_world(tmp_path)
    calm = published(job := world.job("policy", settings(), "calm"), forker.run(job))
    job = world.job("policy", settings(), parallel=way, checkpoint_every=2, grace_seconds=1)
    assert forker.run(job, 3, rank=1, full=3) == [1, 1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "StoreError"
    [folder] = job.checkpoints.iterdir()
    said = rf"rank 1 cannot save the checkpoint of step \d+ in {folder} \([\d,]+ bytes free\): .*File too large"
    assert re.match(said, failure["message"]), failure["message"]
    assert sorted(p.name for p in folder.glob("step-*") if p.suffix != ".partial") == ["step-00000002"]
    found = published(job, forker.run(job, 3))
    assert "resumed from the checkpoint of step 2" in [e["text"] for e in told(found, "note")]
    assert losses(found) == pytest.approx(losses(calm), abs=1e-5)


def test_what_one_rank_wrote_another_number_and_way_reads(tmp_path: Path, forker: Any):
    """Two ranks that are stopped in step 5, then one, or the other way round: the data are in the same order, and losses
    those of a run that nobody disturbed."""
    world = build_world(tmp_path)
    calm = published(job := world.job("policy", settings(), "calm"), forker.run(job))
    for way, ranks, next_way, next_ranks in (("ddp", 2, "ddp", 1), ("fsdp", 3, "ddp", 1), ("ddp", 1, "fsdp", 2)):
        name = f"{way}{ranks}-{next_way}{next_ranks}"
        first = world.job("policy", settings(), name, parallel=way, evaluate_every=4)
        assert forker.run(first, ranks, stop=4) == [1] * ranks
        again = world.job("policy", settings(), name, parallel=next_way, evaluate_every=4)
        found = published(again, forker.run(again, next_ranks))
        assert "resumed from the checkpoint of step 5" in [e["text"] for e in told(found, "note")], name
        assert [e["step"] for e in told(found)] == list(range(1, 11)), name
        assert losses(found) == pytest.approx(losses(calm), abs=1e-6), name
        assert distance(found, calm) < 1e-5, name
