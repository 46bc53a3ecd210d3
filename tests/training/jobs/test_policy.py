"""Preference tuning, compared with a naive loop, and with other micro-batches, ranks and settings."""

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

from tests import factories
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
from tests.training.tiny_inputs import build_tiny_inputs, write_reference
from training.contract.errors import ModelError, TrainingError
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Failure
from training.contract.protocol.metrics import HELD_OUT_METRICS, STEP_METRICS
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import Positions, epoch_order
from training.jobs.policy import prepare
from training.loop.objective import CollatedPairs, PreferenceObjective
from training.loop.rank_sync import Flags
from training.model.load import load_model


def test_policy_losses_match_a_naive_loop(tiny_inputs):
    job = tiny_inputs.job("policy", settings())
    tune(job)
    expected = list(naive_losses(tiny_inputs, 12))
    assert expected[0] == pytest.approx(math.log(2), abs=1e-6)
    assert min(expected[-3:]) < 0.6
    assert losses(job) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("micro_tokens", [1, 40, 100_000])
def test_policy_with_other_micro_batches_has_the_same_losses(tiny_inputs, micro_tokens: int):
    usual = tiny_inputs.job("policy", settings(), "usual")
    other = tiny_inputs.job("policy", settings(micro_tokens=micro_tokens), "other")
    tune(usual)
    tune(other)
    assert losses(other) == pytest.approx(losses(usual), abs=1e-5)


def test_policy_events_and_files_have_the_values_of_the_steps(tiny_inputs):
    job = tiny_inputs.job("policy", settings(), evaluate_every=5)
    made = tune(job)
    assert [e["step"] for e in told(job)] == list(range(1, 13))
    assert [e["step"] for e in told(job, "eval")] == [0, 5, 10, 12]
    first, last = told(job)[0], told(job)[-1]
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    table, rows = load_file(tiny_inputs.reference / "logprobs.safetensors"), steps_examples(tiny_inputs, 12)[-8:]
    for side in SIDES:
        reference = float(table[f"{side}_logprobs"][[example["row"] - 100 for example in rows]].mean())
        assert last[f"rewards/{side}"] == pytest.approx(BETA * (last[f"logps/{side}"] - reference), abs=1e-9)
    assert first["learning_rate"] == RATE and first["grad_norm"] > 0 and first["tokens_per_second"] > 0
    assert first.keys() - {"event", "time", "step"} <= STEP_METRICS.keys()
    assert told(job, "eval")[-1].keys() - {"event", "time", "step"} <= HELD_OUT_METRICS.keys()
    assert told(job, "progress")[-1]["done"] == 12
    assert made.fingerprint == weights_identity(job.staging).fingerprint
    names = {p.name for p in job.staging.iterdir()}
    expected = {"config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json"}
    assert names >= expected | {"training.json", "recipe.json", "metrics.json", "events.jsonl"}
    details, metrics = made.details, json.loads((job.staging / "metrics.json").read_text())
    assert details.model_dump(include=set(metrics)) == metrics
    assert set(details.to_json()) - set(metrics) == {"notes"}
    assert details.step0_loss == pytest.approx(math.log(2), abs=1e-3)
    assert details.rewards_finite is True
    assert details.series["steps"] == list(range(1, 13))
    assert details.series["loss"] == losses(job)
    assert details.tokens == sum(len(e[f"{s}_ids"]) for e in steps_examples(tiny_inputs, 12) for s in SIDES)


@pytest.mark.parametrize(("least", "steps"), [(2, 12), (7, 12), (2, 3)])
def test_policy_without_evaluate_every_spends_a_tenth_on_evaluation(tiny_inputs, monkeypatch, least, steps):
    """With a tenth of 64,000 pairs held out, an evaluation every 50 steps of 64 pairs would cost two thirds of the training.

    The test counts the tokens of an evaluation by hand, a prompt once for both responses.
    """
    monkeypatch.setattr("training.loop.policy_data._EVALUATE_EVERY", least)
    train, held_out = (
        [sum(len(e[f"{side}_ids"]) for side in SIDES) - e["prompt_length"] for e in tiny_inputs.split(name)]
        for name in ("train", "validation")
    )
    affordable = math.ceil(sum(held_out) / (0.1 * 3 * 8 * np.mean(train)))
    assert 3 <= affordable < 7
    job = tiny_inputs.job("policy", settings(max_steps=steps), f"least-{least}-{steps}")
    tune(job)
    seen = [e["step"] for e in told(job, "eval")]
    assert seen == [*range(0, steps, max(least, affordable)), steps]
    assert (len(seen) - 2) * sum(held_out) <= 0.1 * 3 * steps * 8 * np.mean(train)
    notes = [e["text"] for e in told(job, "note") if e["text"].startswith("held-out metrics are computed")]
    expected = "at both ends of the run" if affordable >= steps else f"every {affordable} of 12 steps"
    assert [expected in note for note in notes] == ([True] if least < affordable else [])


def steps_examples(inputs: Any, steps: int) -> list[dict[str, Any]]:
    train = inputs.split("train")
    orders = [epoch_order(len(train), 0, epoch) for epoch in range(steps)]
    batches = [order[at : at + 8] for order in orders for at in range(0, len(train), 8)]
    return [train[i] for batch in batches[:steps] for i in batch]


def test_policy_eval_events_match_the_written_policy(tmp_path):
    """The oracle is plain transformers on the policy's folder, without dropout."""
    inputs = build_tiny_inputs(tmp_path, attention_dropout=0.3)
    job = inputs.job("policy", settings(disable_dropout=False))
    tune(job)
    model = AutoModelForCausalLM.from_pretrained(job.staging)
    table, train = load_file(inputs.reference / "logprobs.safetensors"), len(inputs.split("train"))
    margins = []
    with torch.no_grad():
        for i, example in enumerate(inputs.split("validation"), train):
            chosen, rejected = (float(inputs.plain_logprob(model, example, s)) for s in SIDES)
            reference = table["chosen_logprobs"][i] - table["rejected_logprobs"][i]
            margins.append(BETA * (chosen - rejected - float(reference)))
    found = told(job, "eval")[-1]
    assert found["eval/rewards/margins"] == pytest.approx(np.mean(margins), abs=1e-4)
    assert found["eval/loss"] == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margins]), abs=1e-4)
    assert found["eval/rewards/accuracies"] == np.mean([m > 0 for m in margins])


def test_policy_without_max_steps_takes_all_epochs(tiny_inputs):
    """38 pairs, 8 per batch: 5 steps per epoch."""
    job = tiny_inputs.job("policy", settings(max_steps=None, epochs=2))
    assert tune(job).details.steps == 10


def test_policy_without_held_out_pairs_has_no_eval_events(tmp_path):
    inputs = build_tiny_inputs(tmp_path, train=9, validation=0)
    job = inputs.job("policy", settings(max_steps=1))
    assert tune(job).details.eval == {}
    assert told(job, "eval") == []


def test_policy_with_wrong_held_out_row_in_table_raises(tiny_inputs):
    """Half a nat in one held-out pair is too little for the mean loss."""
    shift_reference(tiny_inputs, 40, 0.5)
    job = tiny_inputs.job("policy", settings())
    message = r"(?s)held-out pairs.* 1 of 7 pairs.*row 140: chosen .*\[reference-check-failed\]"
    with pytest.raises(TrainingError, match=message):
        tune(job)
    assert told(job) == []


def test_policy_with_wrong_row_after_the_first_batch_raises(tiny_inputs):
    """38 pairs in batches of 8: the check covers 16 of the other 30 pairs, always the first and the last."""
    first = set(epoch_order(38, 0, 0)[:8].tolist())
    last = max(set(range(38)) - first)
    shift_reference(tiny_inputs, last, 0.5)
    job = tiny_inputs.job("policy", settings())
    message = rf"(?s) 1 of 16 pairs.*row {100 + last}:.*\[reference-check-failed\]"
    with pytest.raises(TrainingError, match=message):
        tune(job)
    assert told(job) == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_policy_micro_batches_stay_within_their_budget(tmp_path: Path, monkeypatch, dropout: float):
    """With attention dropout a model runs a prompt once per sequence. The test counts the tokens of the rows."""
    ran, collated = [], PreferenceObjective.collate

    def counted(self: PreferenceObjective, model: PreTrainedModel, items: Positions) -> CollatedPairs:
        batch = collated(self, model, items)
        assert batch.rows.sharing == (dropout == 0)
        ran.append((len(items), sum(len(row.ids_T) for row in batch.rows.rows)))
        return batch

    monkeypatch.setattr(PreferenceObjective, "collate", counted)
    fields = settings(micro_tokens=120, max_steps=5, disable_dropout=False)
    tune(build_tiny_inputs(tmp_path, attention_dropout=dropout).job("policy", fields))
    assert max(pairs for pairs, _ in ran) > 2
    assert max(tokens for pairs, tokens in ran if pairs > 1) <= 120


def test_policy_with_errors_that_cancel_in_the_margin_raises(tiny_inputs):
    """All log-probs of the table are off by the same amount: every margin is zero and the loss is ln 2."""
    table = LogProbTable.read(tiny_inputs.reference, 45)
    table.logprobs_P2[:] += 1.0
    table.write(tiny_inputs.reference)
    with pytest.raises(TrainingError, match=r"(?s) 8 of 8 pairs .*\[reference-check-failed\]"):
        tune(tiny_inputs.job("policy", settings()))


def test_step_with_infinite_loss_and_finite_gradient_raises(tiny_inputs):
    """The hinge loss of a margin of minus infinity is infinite; its slope is beta, as everywhere below the corner."""
    prepared = prepare(factories.context(tiny_inputs.job("policy", settings(loss={"type": "hinge"}))))
    train_step, row = prepared.trainer.train_step, int(prepared.data.batches.batch(1)[3])
    prepared.data.table.logprobs_P2[row, 0] = np.inf
    with pytest.raises(TrainingError, match=rf"step 1: .*\(rank 0, rows {100 + row}\).*\[non-finite-loss\]"):
        train_step.step(1, Flags())
    assert train_step.params.norm().isfinite()


def test_policy_with_infinite_gradient_norm_raises_and_keeps_weights(tiny_inputs):
    """Float32 can represent gradients of 1e30, but not the sum of their squares."""
    loss = {"type": "mixture", "beta": BETA, "of": [{"type": "sigmoid", "weight": 1e30}]}
    job = tiny_inputs.job("policy", settings(loss=loss))
    prepared = prepare(factories.context(job, events=EventWriter(job.events)))
    with pytest.raises(TrainingError, match=r"step 1: .* 1 ranks is inf.*\[non-finite-gradient-norm\]"):
        prepared.trainer.run()
    assert told(job) == []
    before = load_file(tiny_inputs.model / "model.safetensors")
    assert all(torch.equal(parameter, before[name]) for name, parameter in prepared.params.parameters.items())


def test_policy_in_bfloat16_stays_near_float32(tiny_inputs):
    """Master weights keep small updates: at a rate of 1e-5 a bfloat16 weight near 1 would never change."""
    exact = tiny_inputs.job("policy", settings(), "exact")
    rounded = tiny_inputs.job("policy", settings(precision="bfloat16"), "rounded")
    tune(exact)
    tune(rounded)
    assert losses(rounded) == pytest.approx(losses(exact), abs=0.05)
    assert load_file(rounded.staging / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_policy_in_bfloat16_keeps_small_updates_in_float32(tiny_inputs):
    job = tiny_inputs.job(
        "policy", settings(precision="bfloat16", optimizer={"learning_rate": 1e-6}), checkpoint_every=12
    )
    tune(job)
    params = load_file(next(job.checkpoints.rglob("rank-00000.safetensors")))["weights/model.norm.weight@0"]
    assert params.dtype == torch.float32
    assert 0 < (params - 1).abs().max() < 2**-9
    assert torch.equal(load_file(job.staging / "model.safetensors")["model.norm.weight"].float(), torch.ones(32))


def test_policy_with_dropout_repeats_and_evaluates_without(tmp_path):
    inputs = build_tiny_inputs(tmp_path, attention_dropout=0.3)
    first, again = (inputs.job("policy", settings(disable_dropout=False), name) for name in ("first", "again"))
    assert tune(first).fingerprint == tune(again).fingerprint
    assert told(first, "eval")[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert losses(first)[0] != pytest.approx(math.log(2), abs=1e-3)


def test_policy_by_default_disables_dropout_of_the_config(tmp_path):
    """DPO's authors and TRL do the same. The first loss is then log 2."""
    with_dropout = build_tiny_inputs(tmp_path / "with", attention_dropout=0.3).job("policy", settings())
    without = build_tiny_inputs(tmp_path / "without").job("policy", settings())
    tune(with_dropout)
    tune(without)
    assert losses(with_dropout) == losses(without)
    assert losses(with_dropout)[0] == pytest.approx(math.log(2), abs=1e-5)
    assert not [e for e in told(with_dropout, "note") if "row of its own" in e["text"]]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_policy_with_activation_checkpointing_has_the_same_bits(tmp_path, dropout: float):
    inputs = build_tiny_inputs(tmp_path, attention_dropout=dropout)
    usual = inputs.job("policy", settings(disable_dropout=False), "usual")
    smaller = inputs.job("policy", settings(disable_dropout=False), "smaller", activation_checkpointing=True)
    assert tune(smaller).fingerprint == tune(usual).fingerprint
    assert losses(smaller) == losses(usual)


@pytest.mark.system
@pytest.mark.slow
def test_compiled_policy_has_the_same_losses(tmp_path):
    """This includes dropout: the warm-up draws random numbers, but the first step draws the same as without compilation."""
    inputs = build_tiny_inputs(tmp_path, attention_dropout=0.2)
    usual = inputs.job("policy", settings(disable_dropout=False), "usual")
    compiled = inputs.job("policy", settings(disable_dropout=False), "compiled", compile=True)
    tune(usual)
    tune(compiled)
    assert losses(compiled) == pytest.approx(losses(usual), abs=1e-5)
    assert [e["eval/loss"] for e in told(compiled, "eval")] == pytest.approx(
        [e["eval/loss"] for e in told(usual, "eval")], abs=1e-5
    )
    phases = [e["phase"] for e in told(compiled, "phase")]
    assert phases.index("compiling") < phases.index("reference check") < phases.index("training")


def test_policy_with_float8_head_on_cpu_raises(tiny_inputs):
    job = tiny_inputs.job("policy", settings(precision="bfloat16", head_precision="float8"))
    with pytest.raises(ModelError, match=r"`training.head_precision: float8` needs a GPU .* on the device cpu"):
        tune(job)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_policy_with_table_of_another_dtype_writes_a_note(tiny_inputs, precision: str):
    """The table is in float32. Rounded weights change the sums of about ten tokens by about a tenth of a nat."""
    job = tiny_inputs.job("policy", settings(max_steps=1, precision=precision))
    details = tune(job).details
    notes = [e["text"] for e in told(job, "note") if "`reference.dtype: bfloat16`" in e["text"]]
    assert details.step0_loss == pytest.approx(math.log(2), abs=1e-5), "of the model that made the table"
    if precision == "float32":
        assert details.step0_apart is None and notes == []
    else:
        apart = details.step0_apart
        assert 1e-3 < apart < 1.0
        assert [f" {apart:.2g} nats" in text for text in notes] == [True]
        phases = [e["phase"] for e in told(job, "phase")]
        assert phases.index("reference check") < phases.index("loading the model that becomes the policy")


@pytest.mark.parametrize(("row", "where"), [(40, "held-out pairs"), (0, "row 100")])
def test_policy_in_bfloat16_with_wrong_row_in_float32_table_raises(tiny_inputs, row: int, where: str):
    """An error of 0.05 sqrt(n) nats is within the tolerance of bfloat16, but not of float32, the dtype of the table."""
    tokens = sum(tiny_inputs.examples[row]["chosen_mask"])
    shift_reference(tiny_inputs, row, 0.05 * math.sqrt(tokens))
    job = tiny_inputs.job("policy", settings(precision="bfloat16"))
    message = rf"(?s)({where}.*1 of \d+ pairs|1 of \d+ pairs.*{where}).*\[reference-check-failed\]"
    with pytest.raises(TrainingError, match=message):
        tune(job)
    assert told(job) == []


def test_policy_in_bfloat16_with_wide_weights_passes_the_reference_check(tmp_path):
    """Rounding of weights with deviation 0.5 changes log-probs by more than a nat, but the table is correct."""
    inputs = build_tiny_inputs(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    model.save_pretrained(inputs.model)
    write_reference(inputs, model.eval())
    job = inputs.job("policy", settings(precision="bfloat16", max_steps=1))
    assert tune(job).details.step0_apart > 1.0


MUON = {"type": "muon", "learning_rate": 1e-3, "adamw": {"learning_rate": 1e-3}}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_policy_with_muon_learns_and_resumes_to_the_same_bits(tiny_inputs, precision: str):
    """The test removes the checkpoint of step 12 after the run. The one of step 6 gives the same policy."""
    job = tiny_inputs.job("policy", settings(optimizer=MUON, precision=precision), checkpoint_every=6)
    made = tune(job)
    first_losses = losses(job)
    assert first_losses[-1] < first_losses[0] - 0.1
    saved = load_file(next(job.checkpoints.rglob("step-00000006/rank-00000.safetensors")))
    states = {part: {name.split("/")[0] for name in saved if part in name} for part in ("q_proj", "embed")}
    assert states == {
        "q_proj": {"weights", "momentum_buffer"},
        "embed": {"weights", "exp_avg", "exp_avg_sq", "step"},
    }
    shutil.rmtree(next(job.checkpoints.rglob("step-00000012")))
    assert tune(job).fingerprint == made.fingerprint
    assert losses(job) == first_losses


def test_the_policy_loads_again(tiny_inputs):
    job = tiny_inputs.job("policy", settings(max_steps=1))
    tune(job)
    model = load_model(job.staging, "float32", torch.device("cpu"))
    assert model.config.tie_word_embeddings


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 1])
def test_policy_on_two_ranks_matches_one(tiny_inputs, forker, batch_size: int):
    """With a batch of one pair, one of the ranks has no pairs, but must still call the collectives."""
    alone = tiny_inputs.job("policy", settings(batch_size=batch_size), "alone")
    both = tiny_inputs.job("policy", settings(batch_size=batch_size), "both")
    tune(alone)
    published(both, forker.run(both, 2))
    assert losses(both) == pytest.approx(losses(alone), abs=1e-5)
    for name in ("grad_norm", "rewards/chosen", "logps/rejected"):
        assert [e[name] for e in told(both)] == pytest.approx([e[name] for e in told(alone)], abs=1e-3)
    # In step 1 every margin is zero, so rounding decides the accuracy.
    accuracies = [[e["rewards/accuracies"] for e in told(job)][1:] for job in (both, alone)]
    assert accuracies[0] == accuracies[1]
    assert told(both, "eval")[-1]["eval/loss"] == pytest.approx(told(alone, "eval")[-1]["eval/loss"], abs=1e-5)


@pytest.mark.slow
def test_policy_on_two_ranks_draws_different_dropout(tmp_path, forker):
    """All pairs are equal, so two ranks with the same random numbers would give the values of one rank with one pair."""

    def alike(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**examples[0], "row": e["row"], "split": e["split"]} for e in examples]

    inputs = build_tiny_inputs(tmp_path, attention_dropout=0.3, arrange=alike)
    alone = inputs.job("policy", settings(batch_size=1, max_steps=1, disable_dropout=False), "alone")
    both = inputs.job("policy", settings(batch_size=2, max_steps=1, disable_dropout=False), "both")
    tune(alone)
    published(both, forker.run(both, 2))
    assert told(both)[0]["logps/chosen"] != pytest.approx(told(alone)[0]["logps/chosen"], abs=1e-4)


@pytest.mark.slow
def test_policy_on_rank_without_memory_writes_advice(tiny_inputs, forker):
    """error.json has the error of torch's allocator, not the closed connection of the other rank."""
    job = tiny_inputs.job("policy", settings())
    assert forker.run(job, 2, memory=3, rank=1) == [1, 1]
    failure = Failure.model_validate_json(job.error.read_bytes())
    assert (failure.type, failure.rank, failure.traceback) == ("TrainingError", 1, "")
    assert failure.message.startswith("policy: ") and "can't allocate memory" in failure.message
    for advice in ("`compute.activation_checkpointing: true`", "`training.micro_tokens` (128)", "[out-of-memory]"):
        assert advice in failure.message
    assert "torch.empty" in job.log.read_text()
