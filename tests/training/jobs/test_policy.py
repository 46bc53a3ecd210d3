"""Preference tuning against a naive loop, and against itself cut and spread in other ways."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.training.runs import (
    BETA,
    RATE,
    SIDES,
    losses,
    naive_losses,
    published,
    settings,
    shift_reference,
    told,
    tune,
)
from tests.training.worlds import build_world, write_reference
from training.contract.errors import ModelError, TrainingError
from training.contract.identity.model_identity import weights_fingerprint, weights_identity
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Failure
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import Positions, epoch_order
from training.distributed import ALONE
from training.jobs.policy import prepare
from training.loop.objective import CollatedPairs, PreferenceObjective
from training.loop.rank_sync import Flags
from training.model.load import load_model


def test_losses_are_those_of_a_naive_loop(tiny_world):
    job = tiny_world.job("policy", settings())
    tune(job)
    expected = list(naive_losses(tiny_world, 12))
    assert expected[0] == pytest.approx(math.log(2), abs=1e-6)
    assert min(expected[-3:]) < 0.6
    assert losses(job) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("micro_tokens", [1, 40, 100_000])
def test_micro_batches_change_nothing(tiny_world, micro_tokens: int):
    usual = tiny_world.job("policy", settings(), "usual")
    other = tiny_world.job("policy", settings(micro_tokens=micro_tokens), "other")
    tune(usual)
    tune(other)
    assert losses(other) == pytest.approx(losses(usual), abs=1e-5)


def test_what_is_told_and_written(tiny_world):
    job = tiny_world.job("policy", settings(), evaluate_every=5)
    made = tune(job)
    assert [e["step"] for e in told(job)] == list(range(1, 13))
    assert [e["step"] for e in told(job, "eval")] == [0, 5, 10, 12]
    first, last = told(job)[0], told(job)[-1]
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    table, rows = load_file(tiny_world.reference / "logprobs.safetensors"), steps_examples(tiny_world, 12)[-8:]
    for side in SIDES:
        reference = float(table[f"{side}_logprobs"][[example["row"] - 100 for example in rows]].mean())
        assert last[f"rewards/{side}"] == pytest.approx(BETA * (last[f"logps/{side}"] - reference), abs=1e-9)
    assert first["learning_rate"] == RATE and first["grad_norm"] > 0 and first["tokens_per_second"] > 0
    assert told(job, "progress")[-1]["done"] == 12
    assert made.fingerprint == weights_fingerprint(weights_identity(job.staging))
    names = {p.name for p in job.staging.iterdir()}
    expected = {"config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json"}
    assert names >= expected | {"training.json", "recipe.json", "metrics.json", "events.jsonl"}
    details = json.loads((job.staging / "metrics.json").read_text())
    assert details == made.details
    assert details["step0_loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert details["rewards_finite"] is True
    assert details["series"]["steps"] == list(range(1, 13))
    assert details["series"]["loss"] == losses(job)
    assert details["tokens"] == sum(len(e[f"{s}_ids"]) for e in steps_examples(tiny_world, 12) for s in SIDES)


@pytest.mark.parametrize(("least", "steps"), [(2, 12), (7, 12), (2, 3)])
def test_held_out_metrics_between_steps_cost_at_most_a_tenth_of_them(tiny_world, monkeypatch, least, steps):
    """Of 64,000 pairs a tenth is held out: every 50 steps of 64 pairs they would cost two thirds of the training.

    Here the tokens that one look runs are counted by hand, a prompt once for both responses.
    """
    monkeypatch.setattr("training.loop.policy_data._EVALUATE_EVERY", least)
    train, held_out = (
        [sum(len(e[f"{side}_ids"]) for side in SIDES) - e["prompt_length"] for e in tiny_world.split(name)]
        for name in ("train", "validation")
    )
    affordable = math.ceil(sum(held_out) / (0.1 * 3 * 8 * np.mean(train)))
    assert 3 <= affordable < 7
    job = tiny_world.job("policy", settings(max_steps=steps), f"least-{least}-{steps}")
    tune(job)
    seen = [e["step"] for e in told(job, "eval")]
    assert seen == [*range(0, steps, max(least, affordable)), steps]
    assert (len(seen) - 2) * sum(held_out) <= 0.1 * 3 * steps * 8 * np.mean(train)
    notes = [e["text"] for e in told(job, "note") if e["text"].startswith("held-out metrics are computed")]
    expected = "at both ends of the run" if affordable >= steps else f"every {affordable} of 12 steps"
    assert [expected in note for note in notes] == ([True] if least < affordable else [])


def steps_examples(world: Any, steps: int) -> list[dict[str, Any]]:
    train = world.split("train")
    orders = [epoch_order(len(train), 0, epoch) for epoch in range(steps)]
    batches = [order[at : at + 8] for order in orders for at in range(0, len(train), 8)]
    return [train[i] for batch in batches[:steps] for i in batch]


def test_held_out_metrics_are_those_of_the_written_policy(tmp_path):
    """The last eval event, computed again from the policy's folder with plain transformers: dropout is of training alone."""
    world = build_world(tmp_path, attention_dropout=0.3)
    job = world.job("policy", settings(disable_dropout=False))
    tune(job)
    model = AutoModelForCausalLM.from_pretrained(job.staging)
    table, train = load_file(world.reference / "logprobs.safetensors"), len(world.split("train"))
    margins = []
    with torch.no_grad():
        for i, example in enumerate(world.split("validation"), train):
            chosen, rejected = (float(world.plain_logprob(model, example, s)) for s in SIDES)
            reference = table["chosen_logprobs"][i] - table["rejected_logprobs"][i]
            margins.append(BETA * (chosen - rejected - float(reference)))
    found = told(job, "eval")[-1]
    assert found["eval/rewards/margins"] == pytest.approx(np.mean(margins), abs=1e-4)
    assert found["eval/loss"] == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margins]), abs=1e-4)
    assert found["eval/rewards/accuracies"] == np.mean([m > 0 for m in margins])


def test_epochs_without_max_steps(tiny_world):
    """38 pairs, 8 a batch: 5 steps an epoch."""
    job = tiny_world.job("policy", settings(max_steps=None, epochs=2))
    assert tune(job).details["steps"] == 10


def test_without_held_out_pairs_there_is_no_evaluation(tmp_path):
    world = build_world(tmp_path, train=9, validation=0)
    job = world.job("policy", settings(max_steps=1))
    assert "eval" not in tune(job).details
    assert told(job, "eval") == []


def test_a_wrong_reference_row_is_found_before_the_first_step(tiny_world):
    """Half a nat in one held-out pair: too little to see in the mean loss."""
    shift_reference(tiny_world, 40, 0.5)
    job = tiny_world.job("policy", settings())
    with pytest.raises(TrainingError, match=r"held-out pairs: the loss .* 1 of 7 pairs(.|\n)*row 140: chosen "):
        tune(job)
    assert told(job) == []


def test_a_wrong_row_beyond_the_first_batch_is_found_as_well(tiny_world):
    """38 pairs in batches of 8: 16 of the other 30 are looked at, the first and the last of them in any case."""
    first = set(epoch_order(38, 0, 0)[:8].tolist())
    last = max(set(range(38)) - first)
    shift_reference(tiny_world, last, 0.5)
    job = tiny_world.job("policy", settings())
    with pytest.raises(TrainingError, match=rf"16 pairs spread over (.|\n)* 1 of 16 pairs(.|\n)*row {100 + last}:"):
        tune(job)
    assert told(job) == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_no_micro_batch_runs_more_tokens_than_its_budget(tmp_path: Path, monkeypatch, dropout: float):
    """With dropout in its attention a model runs a prompt once a sequence. What counts are the rows' own tokens."""
    ran, collated = [], PreferenceObjective.collate

    def counted(self: PreferenceObjective, model: PreTrainedModel, items: Positions) -> CollatedPairs:
        found = collated(self, model, items)
        assert found.rows.sharing == (dropout == 0)
        ran.append((len(items), sum(len(row.ids_T) for row in found.rows.rows)))
        return found

    monkeypatch.setattr(PreferenceObjective, "collate", counted)
    fields = settings(micro_tokens=120, max_steps=5, disable_dropout=False)
    tune(build_world(tmp_path, attention_dropout=dropout).job("policy", fields))
    assert max(pairs for pairs, _ in ran) > 2
    assert max(tokens for pairs, tokens in ran if pairs > 1) <= 120


def test_errors_that_cancel_in_the_mean_are_found(tiny_world):
    """All references off by as much on both sides: every margin is still zero and the loss is still ln 2."""
    table = LogProbTable.read(tiny_world.reference, 45)
    table.logprobs_P2[:] += 1.0
    table.write(tiny_world.reference)
    with pytest.raises(TrainingError, match="8 of 8 pairs differ by more than rounding"):
        tune(tiny_world.job("policy", settings()))


def test_a_loss_that_is_not_finite_stops_the_run_though_its_gradient_is(tiny_world):
    """The hinge of a margin of minus infinity is infinite, and its slope is beta as anywhere below the corner."""
    prepared = prepare(tiny_world.job("policy", settings(loss={"type": "hinge"})), ALONE, EventWriter(None))
    train_step, row = prepared.trainer.train_step, int(prepared.data.batches.batch(1)[3])
    prepared.data.table.logprobs_P2[row, 0] = np.inf
    with pytest.raises(
        TrainingError, match=rf"step 1: the loss .* is not finite \(rank 0, rows {100 + row}\); no weight"
    ):
        train_step.step(1, Flags())
    assert train_step.params.norm().isfinite()


def test_a_gradient_of_which_only_the_norm_is_not_finite_stops_the_run(tiny_world):
    """Numbers around 1e30 are float32; the sum of their squares is none. The weights are then still those of the file."""
    loss = {"type": "mixture", "beta": BETA, "of": [{"type": "sigmoid", "weight": 1e30}]}
    job = tiny_world.job("policy", settings(loss=loss))
    prepared = prepare(job, ALONE, EventWriter(job.events))
    with pytest.raises(TrainingError, match="step 1: the norm of the gradient is inf on all 1 ranks together"):
        prepared.trainer.run()
    assert told(job) == []
    before = load_file(tiny_world.model / "model.safetensors")
    assert all(torch.equal(parameter, before[name]) for name, parameter in prepared.params.parameters.items())


def test_bfloat16_learns_like_float32(tiny_world):
    """Masters keep what bfloat16 would round away: with a rate of 1e-5 a bfloat16 weight near 1 would never move."""
    exact = tiny_world.job("policy", settings(), "exact")
    rounded = tiny_world.job("policy", settings(precision="bfloat16"), "rounded")
    tune(exact)
    tune(rounded)
    assert losses(rounded) == pytest.approx(losses(exact), abs=0.05)
    assert load_file(rounded.staging / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_bfloat16_masters_move_by_less_than_bfloat16_can_tell(tiny_world):
    job = tiny_world.job(
        "policy", settings(precision="bfloat16", optimizer={"learning_rate": 1e-6}), checkpoint_every=12
    )
    tune(job)
    params = load_file(next(job.checkpoints.rglob("rank-00000.safetensors")))["weights/model.norm.weight@0"]
    assert params.dtype == torch.float32
    assert 0 < (params - 1).abs().max() < 2**-9
    assert torch.equal(load_file(job.staging / "model.safetensors")["model.norm.weight"].float(), torch.ones(32))


def test_dropout_is_on_in_training_only_and_repeats(tmp_path):
    world = build_world(tmp_path, attention_dropout=0.3)
    first, again = (world.job("policy", settings(disable_dropout=False), name) for name in ("first", "again"))
    assert tune(first).fingerprint == tune(again).fingerprint
    assert told(first, "eval")[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert losses(first)[0] != pytest.approx(math.log(2), abs=1e-3)


def test_dropout_of_the_config_is_off_unless_it_is_asked_for(tmp_path):
    """As in the authors' own program and in TRL: then the first loss is log 2, and all are those of a model without any."""
    with_dropout = build_world(tmp_path / "with", attention_dropout=0.3).job("policy", settings())
    without = build_world(tmp_path / "without").job("policy", settings())
    tune(with_dropout)
    tune(without)
    assert losses(with_dropout) == losses(without)
    assert losses(with_dropout)[0] == pytest.approx(math.log(2), abs=1e-5)
    assert not [e for e in told(with_dropout, "note") if "row of its own" in e["text"]]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing_gives_the_same_policy_to_the_last_bit(tmp_path, dropout: float):
    world = build_world(tmp_path, attention_dropout=dropout)
    usual = world.job("policy", settings(disable_dropout=False), "usual")
    smaller = world.job("policy", settings(disable_dropout=False), "smaller", activation_checkpointing=True)
    assert tune(smaller).fingerprint == tune(usual).fingerprint
    assert losses(smaller) == losses(usual)


@pytest.mark.system
@pytest.mark.slow
def test_compiled_it_learns_the_same(tmp_path):
    """Dropout too: warming up draws random numbers, and the first step draws those it would have drawn without."""
    world = build_world(tmp_path, attention_dropout=0.2)
    usual = world.job("policy", settings(disable_dropout=False), "usual")
    compiled = world.job("policy", settings(disable_dropout=False), "compiled", compile=True)
    tune(usual)
    tune(compiled)
    assert losses(compiled) == pytest.approx(losses(usual), abs=1e-5)
    assert [e["eval/loss"] for e in told(compiled, "eval")] == pytest.approx(
        [e["eval/loss"] for e in told(usual, "eval")], abs=1e-5
    )
    phases = [e["phase"] for e in told(compiled, "phase")]
    assert phases.index("compiling") < phases.index("reference check") < phases.index("training")


def test_a_head_of_eight_bits_is_refused_on_a_device_without(tiny_world):
    job = tiny_world.job("policy", settings(precision="bfloat16", head_precision="float8"))
    with pytest.raises(ModelError, match=r"`training.head_precision: float8` needs a GPU .* on the device cpu"):
        tune(job)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_table_in_another_dtype_is_told_with_what_it_costs(tiny_world, precision: str):
    """The world's table is in float32. Rounded weights move the sums of some ten tokens by a tenth of a nat, not by ten."""
    job = tiny_world.job("policy", settings(max_steps=1, precision=precision))
    details = tune(job).details
    notes = [e["text"] for e in told(job, "note") if "`reference.dtype: bfloat16`" in e["text"]]
    assert details["step0_loss"] == pytest.approx(math.log(2), abs=1e-5), "of the model that made the table"
    if precision == "float32":
        assert "step0_apart" not in details and notes == []
    else:
        apart = details["step0_apart"]
        assert 1e-3 < apart < 1.0
        assert [f"before training they differ by {apart:.2g} nats a response" in text for text in notes] == [True]
        phases = [e["phase"] for e in told(job, "phase")]
        assert phases.index("reference check") < phases.index("loading the model that becomes the policy")


@pytest.mark.parametrize(("row", "where"), [(40, "held-out pairs"), (0, "row 100")])
def test_the_proof_is_as_sharp_where_the_policy_rounds(tiny_world, row: int, where: str):
    """Wrong by 0.05 sqrt(n) nats in one row, which rounding to bfloat16 could explain: the model of the table could not."""
    tokens = sum(tiny_world.examples[row]["chosen_mask"])
    shift_reference(tiny_world, row, 0.05 * math.sqrt(tokens))
    job = tiny_world.job("policy", settings(precision="bfloat16"))
    with pytest.raises(TrainingError, match=rf"{where}(.|\n)*1 of \d+ pairs|1 of \d+ pairs(.|\n)*{where}"):
        tune(job)
    assert told(job) == []


def test_what_rounding_does_to_wide_weights_is_no_false_alarm(tmp_path):
    """Weights of deviation 0.5 move whole nats when they are rounded; the table is right all the same."""
    world = build_world(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(world.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    model.save_pretrained(world.model)
    write_reference(world, model.eval())
    job = world.job("policy", settings(precision="bfloat16", max_steps=1))
    assert tune(job).details["step0_apart"] > 1.0


MUON = {"type": "muon", "learning_rate": 1e-3, "adamw": {"learning_rate": 1e-3}}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_learns_and_is_taken_up_again_to_the_last_bit(tiny_world, precision: str):
    """The checkpoint of step 12 is taken away after the run: the one of step 6 leads to the same policy."""
    job = tiny_world.job("policy", settings(optimizer=MUON, precision=precision), checkpoint_every=6)
    made = tune(job)
    course = losses(job)
    assert course[-1] < course[0] - 0.1
    saved = load_file(next(job.checkpoints.rglob("step-00000006/rank-00000.safetensors")))
    states = {part: {name.split("/")[0] for name in saved if part in name} for part in ("q_proj", "embed")}
    assert states == {
        "q_proj": {"weights", "momentum_buffer"},
        "embed": {"weights", "exp_avg", "exp_avg_sq", "step"},
    }
    shutil.rmtree(next(job.checkpoints.rglob("step-00000012")))
    assert tune(job).fingerprint == made.fingerprint
    assert losses(job) == course


def test_the_policy_loads_again(tiny_world):
    job = tiny_world.job("policy", settings(max_steps=1))
    tune(job)
    model = load_model(job.staging, "float32", torch.device("cpu"))
    assert model.config.tie_word_embeddings


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 1])
def test_two_processes_are_one(tiny_world, forker, batch_size: int):
    """A batch of one pair leaves one of the two ranks with nothing: it must join the exchanges all the same."""
    alone = tiny_world.job("policy", settings(batch_size=batch_size), "alone")
    both = tiny_world.job("policy", settings(batch_size=batch_size), "both")
    tune(alone)
    published(both, forker.run(both, 2))
    assert losses(both) == pytest.approx(losses(alone), abs=1e-5)
    for name in ("grad_norm", "rewards/chosen", "logps/rejected"):
        assert [e[name] for e in told(both)] == pytest.approx([e[name] for e in told(alone)], abs=1e-3)
    # In step 1 every margin is zero, and which way it is rounded decides what counts as accurate.
    accuracies = [[e["rewards/accuracies"] for e in told(job)][1:] for job in (both, alone)]
    assert accuracies[0] == accuracies[1]
    assert told(both, "eval")[-1]["eval/loss"] == pytest.approx(told(alone, "eval")[-1]["eval/loss"], abs=1e-5)


@pytest.mark.slow
def test_each_rank_draws_its_own_dropout(tmp_path, forker):
    """All pairs are equal, so that two ranks with the same random numbers would say what one says alone of one pair."""

    def alike(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**examples[0], "row": e["row"], "split": e["split"]} for e in examples]

    world = build_world(tmp_path, attention_dropout=0.3, arrange=alike)
    alone = world.job("policy", settings(batch_size=1, max_steps=1, disable_dropout=False), "alone")
    both = world.job("policy", settings(batch_size=2, max_steps=1, disable_dropout=False), "both")
    tune(alone)
    published(both, forker.run(both, 2))
    assert told(both)[0]["logps/chosen"] != pytest.approx(told(alone)[0]["logps/chosen"], abs=1e-4)


@pytest.mark.slow
def test_a_rank_that_lacks_memory_says_what_to_lower(tiny_world, forker):
    """What torch's own allocator says; the other rank, whose connection is closed then, is not heard."""
    job = tiny_world.job("policy", settings())
    assert forker.run(job, 2, memory=3, rank=1) == [1, 1]
    failure = Failure.model_validate_json(job.error.read_bytes())
    assert (failure.type, failure.rank, failure.traceback) == ("TrainingError", 1, "")
    assert failure.message.startswith("policy: ") and "can't allocate memory: you tried to allocate" in failure.message
    assert (
        "; set `compute.activation_checkpointing: true`, or lower `training.micro_tokens` (128), or" in failure.message
    )
    assert "torch.empty" in job.log.read_text()
