"""One training job with every strategy: losses and weights are the same as with one process.

The ranks are real processes that communicate over gloo. The environment of HSDP's ranks describes two nodes of two ranks.
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

from tests import factories
from tests.training import runs
from tests.training.model.architectures import build
from tests.training.runs import losses, on_two_ranks, published, told
from tests.training.tiny_inputs import build_tiny_inputs, write_reference
from training.contract.errors import TrainingError
from training.contract.store.artifact import Artifact
from training.distributed import Group
from training.jobs.policy import prepare
from training.loop.rank_sync import Flags

pytestmark = pytest.mark.slow


def settings(**changes: Any) -> dict[str, Any]:
    return runs.settings(**{"batch_size": 6, "micro_tokens": 40, "max_steps": 10} | changes)


def weights(artifact: Artifact[Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(artifact.folder / "model.safetensors")
    return found


def distance(left: Artifact[Any], right: Artifact[Any]) -> float:
    """Return the largest difference of two weights. Assert that names, shapes and dtypes are the same."""
    ones, others = weights(left), weights(right)
    assert {n: (t.shape, t.dtype) for n, t in ones.items()} == {n: (t.shape, t.dtype) for n, t in others.items()}
    return max(float((tensor.float() - others[name].float()).abs().max()) for name, tensor in ones.items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_strategy_equals_one_process(tmp_path: Path, forker: Any, tied: bool):
    """A batch of six pairs is several micro-batches per rank, and the last batch of the epoch has two pairs. So two of four
    ranks have none, and with shards they run a padding micro-batch. Three ranks have unequal parts of a tensor."""
    inputs = build_tiny_inputs(tmp_path, train=32, validation=5, tied=tied)
    alone = published(job := inputs.job("policy", settings(), "alone"), forker.run(job))
    for way, ranks, nodes in (("ddp", 2, 1), ("fsdp", 2, 1), ("hsdp", 4, 2)) if tied else (("fsdp", 3, 1),):
        job = inputs.job("policy", settings(), f"{way}-{ranks}", parallel=way, evaluate_every=5)
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
    "activation checkpointing": ({}, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_shards_equal_one_process_with_every_option(tmp_path: Path, forker: Any, option: str):
    """Each option runs or modifies the model differently."""
    inputs, (training, compute) = build_tiny_inputs(tmp_path), OPTIONS[option]
    alone = published(job := inputs.job("policy", settings(**training), "alone", **compute), forker.run(job))
    job = inputs.job("policy", settings(**training), "shards", parallel="fsdp", **compute)
    shards = published(job, forker.run(job, 2))
    assert losses(shards) == pytest.approx(losses(alone), abs=1e-5)
    assert distance(shards, alone) < 1e-5


def test_layerdrop_in_shards_raises(tmp_path: Path, forker: Any):
    """Ranks would skip different layers, and wait forever for each other."""
    inputs = build_tiny_inputs(tmp_path)
    build("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5}).save_pretrained(inputs.model)
    job = inputs.job("policy", settings(disable_dropout=False), "shards", parallel="fsdp")
    assert forker.run(job, 2) == [1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "ModelError"
    assert failure["message"].startswith("OPTForCausalLM "), "not FSDP's class"
    assert failure["message"].endswith(" [layerdrop]")


MUON = {"type": "muon", "learning_rate": 3e-3, "weight_decay": 0.1, "adamw": {"learning_rate": 3e-3}}


@pytest.mark.parametrize(("way", "ranks", "nodes"), [("ddp", 2, 1), ("ddp", 4, 2), ("fsdp", 2, 1)])
def test_distributed_muon_equals_torchs_muon(tmp_path: Path, forker: Any, way: str, ranks: int, nodes: int):
    """One step, for which the sums of gradients have the same bits. A rank that is alone on its node uses torch's Muon."""
    inputs = build_tiny_inputs(tmp_path)
    one_step = settings(optimizer=MUON, micro_tokens=1000, max_steps=1, max_grad_norm=1e9)
    alone, shared = inputs.job("policy", one_step, "alone"), inputs.job("policy", one_step, "shared", parallel=way)
    found = published(shared, forker.run(shared, ranks, nodes))
    assert distance(found, published(alone, forker.run(alone, ranks, ranks))) < 1e-7


def test_muon_in_shards_equals_muon_over_full_matrices(tmp_path: Path, forker: Any):
    """Several steps, resumed with four ranks after three. The last bits differ: bfloat16 and the iterations amplify small
    directions, up to a hundredth of the total update. Orthogonalized shards or a lost momentum would differ more."""
    inputs = build_tiny_inputs(tmp_path)
    steps = settings(optimizer=MUON, max_steps=5, max_grad_norm=1e9)
    unsharded = published(job := inputs.job("policy", steps, "whole"), forker.run(job))
    first, again = (inputs.job("policy", steps, "shards", parallel=way) for way in ("fsdp", "hsdp"))
    assert forker.run(first, 3, stop=2) == [1, 1, 1]
    shards = published(again, forker.run(again, 4, 2))
    assert "resumed from the checkpoint of step 3" in [e["text"] for e in told(shards, "note")]
    assert losses(shards) == pytest.approx(losses(unsharded), abs=1e-3)
    before = load_file(inputs.model / "model.safetensors")
    update = max(float((tensor - before[name]).abs().max()) for name, tensor in weights(unsharded).items())
    assert distance(shards, unsharded) < 0.03 * update


@pytest.mark.parametrize("option", ["all weights", "an adapter"])
def test_bfloat16_gives_the_same_losses_with_every_strategy(tmp_path: Path, forker: Any, option: str):
    """With one pair per row. Every rank rounds the same float32 master weights, and gradients are summed in float32. Only the
    order of a sum differs; it may change the rounding of a weight to bfloat16, and a loss by 1e-4. (Rows with other pairs
    round differently, by a hundredth of a nat.)"""
    changes, way, ranks = {"all weights": ({}, "hsdp", 4), "an adapter": ({"adapter": LORA}, "fsdp", 2)}[option]
    inputs = build_tiny_inputs(tmp_path)
    fields = settings(precision="bfloat16", micro_tokens=1, max_steps=4, **changes)
    alone, shards = (inputs.job("policy", fields, name, parallel=way) for name in ("alone", "shards"))
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
}  # each token uses all experts: rounding cannot change the choice
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "positions": ("olmo2", {}),
    "routers": ("hunyuan_v1_moe", EXPERTS),
    "states": ("mamba", {"state_size": 4, "time_step_rank": 2}),
}


@pytest.mark.parametrize("kept", MIXED)
def test_tensors_kept_in_float32_stay_float32_in_shards(tmp_path: Path, forker: Any, kept: str):
    """Rotary positions, routers of experts, the residual stream. mamba has nested modules of the same kind."""
    kind, changes = MIXED[kept]
    inputs = build_tiny_inputs(tmp_path, train=8, validation=2)
    (inputs.model / "model.safetensors").unlink()
    build(kind, changes).save_pretrained(inputs.model)
    write_reference(inputs, AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.bfloat16))
    fields, ways = settings(precision="bfloat16", micro_tokens=1, max_steps=2), []
    for way, ranks in (("ddp", 2), ("hsdp", 4) if kept == "routers" else ("fsdp", 2)):
        job = inputs.job("policy", fields, way, parallel=way)
        ways.append(published(job, forker.run(job, ranks, ranks // 2)))
    assert losses(ways[0])[0] == pytest.approx(losses(ways[1])[0], abs=1e-12)
    assert losses(ways[0]) == pytest.approx(losses(ways[1]), abs=1e-3)
    assert distance(*ways) < 1e-2


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_non_finite_loss_stops_every_rank(tmp_path: Path, forker: Any, way: str):
    """A learning rate of 1e30 makes the weights useless in step 1."""
    inputs = build_tiny_inputs(tmp_path)
    job = inputs.job(
        "policy", settings(optimizer={"learning_rate": 1e30}), parallel=way, checkpoint_every=1, processes_per_node=2
    )
    assert forker.run(job, 2) == [1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "TrainingError"
    assert re.search(r"^step 2: .*\(rank 0, rows 1.*; rank 1, rows 1.* \[non-finite-loss\]$", failure["message"])
    assert [p.name for p in job.checkpoints.glob("*/*")] == ["step-00000001"]


def test_a_nan_loss_in_a_padding_micro_batch_reports_only_the_rank_of_the_pair(tmp_path: Path):
    """Five pairs, each in a row of its own. The rank with two pairs also runs the shortest of all pairs, times zero. If the
    loss of this pair is NaN, the gradients of both ranks are NaN. The error must name only the pair and its rank."""
    job = build_tiny_inputs(tmp_path).job("policy", settings(micro_tokens=1, batch_size=5), parallel="fsdp")

    def work(group: Group) -> tuple[list[int], int, str]:
        prepared = prepare(factories.context(job, group))
        batch = prepared.data.batches.batch(1)
        shortest = int(batch[prepared.data.batches.lengths.run_I[batch].argmin()])
        prepared.data.table.logprobs_P2[shortest, 0] = np.nan
        items = [int(part.items[0]) for part in prepared.data.batches.micro_batches(1, group.rank, group.world)]
        with pytest.raises(TrainingError, match=r"\[non-finite-loss\]") as caught:
            prepared.trainer.train_step.step(1, Flags())
        return items, shortest, str(caught.value)

    (items_0, shortest, message_0), (items_1, _, message_1) = on_two_ranks(tmp_path, work)
    assert sorted(map(len, (items_0, items_1))) == [2, 3]
    assert message_0 == message_1
    assert f"(rank {0 if shortest in items_0 else 1}, rows {100 + shortest});" in message_0


def test_a_non_finite_gradient_with_finite_losses_names_all_rows_of_its_rank(tmp_path: Path):
    job = build_tiny_inputs(tmp_path).job("policy", settings(batch_size=5), parallel="ddp")

    def work(group: Group) -> tuple[list[int], str]:
        prepared = prepare(factories.context(job, group))
        if group.rank == 1:
            next(iter(prepared.params.model.parameters())).register_hook(lambda gradient: gradient * np.nan)
        parts = prepared.data.batches.micro_batches(1, group.rank, group.world)
        with pytest.raises(TrainingError, match=r"\[non-finite-loss\]") as caught:
            prepared.trainer.train_step.step(1, Flags())
        return sorted(100 + int(item) for part in parts for item in part.items), str(caught.value)

    (_, message_0), (rows, message_1) = on_two_ranks(tmp_path, work)
    reported = re.search(r"\(rank 1, rows ([\d, ]+)\);", message_1)
    assert message_0 == message_1 and reported is not None
    assert sorted(map(int, reported[1].split(", "))) == rows


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_failed_save_of_one_rank_stops_all_and_the_run_resumes(tmp_path: Path, forker: Any, way: str):
    """From step 3 on, the second of three ranks lacks disk space. All ranks stop with its error, a step after the failed save.
    With space again, the run resumes from step 2, with the losses of an undisturbed run."""
    inputs = build_tiny_inputs(tmp_path)
    undisturbed = published(job := inputs.job("policy", settings(), "undisturbed"), forker.run(job))
    job = inputs.job("policy", settings(), parallel=way, checkpoint_every=2, grace_seconds=1)
    assert forker.run(job, 3, rank=1, full=3) == [1, 1, 1]
    failure = json.loads(job.error.read_text())
    assert failure["type"] == "StoreError"
    [folder] = job.checkpoints.iterdir()
    values = rf"rank 1 .* step \d+ in {folder} \([\d,]+ bytes free\): .*File too large"
    assert re.match(values, failure["message"]), failure["message"]
    assert sorted(p.name for p in folder.glob("step-*") if p.suffix != ".partial") == ["step-00000002"]
    found = published(job, forker.run(job, 3))
    assert "resumed from the checkpoint of step 2" in [e["text"] for e in told(found, "note")]
    assert losses(found) == pytest.approx(losses(undisturbed), abs=1e-5)


def test_a_run_resumes_with_another_number_of_ranks_and_strategy(tmp_path: Path, forker: Any):
    """The run is stopped in step 5. Losses and order of the data are the same as in an undisturbed run."""
    inputs = build_tiny_inputs(tmp_path)
    undisturbed = published(job := inputs.job("policy", settings(), "undisturbed"), forker.run(job))
    for way, ranks, next_way, next_ranks in (("ddp", 2, "ddp", 1), ("fsdp", 3, "ddp", 1), ("ddp", 1, "fsdp", 2)):
        name = f"{way}{ranks}-{next_way}{next_ranks}"
        first = inputs.job("policy", settings(), name, parallel=way, evaluate_every=4)
        assert forker.run(first, ranks, stop=4) == [1] * ranks
        again = inputs.job("policy", settings(), name, parallel=next_way, evaluate_every=4)
        found = published(again, forker.run(again, next_ranks))
        assert "resumed from the checkpoint of step 5" in [e["text"] for e in told(found, "note")], name
        assert [e["step"] for e in told(found)] == list(range(1, 11)), name
        assert losses(found) == pytest.approx(losses(undisturbed), abs=1e-6), name
        assert distance(found, undisturbed) < 1e-5, name
