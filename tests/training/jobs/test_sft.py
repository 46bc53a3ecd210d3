"""Supervised tuning, compared with a naive loop; and resuming."""

import math
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import factories
from tests.training.runs import losses, published, told
from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.config.training import SupervisedTuning
from training.contract.errors import DataError, ModelError, TemplateError
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.details import ReferenceModelDetails
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.artifact import JobResult
from training.data.tokenization.batch_sampler import epoch_order
from training.data.tokenization.pair_dataset import PAIRS_SCHEMA
from training.jobs.sft import run
from training.loop import run_state

RATE = 3e-3
# Adam's first updates are gradient / (|gradient| + eps). With eps 1e-8 the rounding of a gradient near zero decides the sign
# of a full update, and float32 trajectories differ by 6e-5. With 1e-6 the test compares the computation.
EPS = 1e-6


def settings(**changes: Any) -> dict[str, Any]:
    fields = {
        "epochs": 2,
        "batch_size": 8,
        "micro_tokens": 60,
        "optimizer": {"learning_rate": RATE, "eps": EPS},
        "schedule": {"type": "linear", "warmup_ratio": 0.0},
    }
    return SupervisedTuning.model_validate(fields | changes).model_dump(mode="json")


def tune(job: Job) -> JobResult[ReferenceModelDetails]:
    return run(factories.context(job, events=EventWriter(job.events, keep=True)))


def naive_losses(inputs: Any) -> list[float]:
    """Return token-mean negative log-likelihoods: one sequence at a time, 5 steps per epoch, linear decay by hand."""
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, eps=EPS)
    train, found = inputs.split("train"), []
    for step in range(10):
        batch = [train[i] for i in epoch_order(len(train), 0, step // 5)[step % 5 * 8 :][:8]]
        tokens = sum(sum(example["chosen_mask"]) for example in batch)
        loss = -sum(inputs.plain_logprob(model, example, "chosen") for example in batch) / tokens
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / 10)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def test_sft_losses_match_a_naive_loop(tiny_inputs):
    job = tiny_inputs.job("sft", settings())
    made = tune(job)
    expected = naive_losses(tiny_inputs)
    assert expected[-1] < expected[0]
    assert losses(job) == pytest.approx(expected, abs=1e-5)
    assert made.fingerprint == weights_identity(job.staging).fingerprint
    assert (job.staging / "tokenizer_config.json").is_file()
    assert made.details.series["loss"] == losses(job)


def test_sft_in_bfloat16_stays_near_float32(tiny_inputs):
    """The oracle is the naive loop in float32; rounding changes each loss by less than a percent."""
    job = tiny_inputs.job("sft", settings(precision="bfloat16"))
    tune(job)
    assert losses(job) == pytest.approx(naive_losses(tiny_inputs), rel=0.01)
    assert {tensor.dtype for tensor in load_file(job.staging / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_sft_in_shards_matches_one_process(tiny_inputs, forker):
    """Batches of eight in rows of 60 tokens. The last batch of an epoch has six pairs: too few rows for three ranks."""
    models = []
    for ranks, parallel in ((1, "auto"), (2, "fsdp"), (3, "fsdp")):
        job = tiny_inputs.job("sft", settings(), f"{parallel}-{ranks}", parallel=parallel)
        made = published(job, forker.run(job, ranks))
        models.append((losses(job), load_file(made.folder / "model.safetensors")))
    (expected, weights), *others = models
    assert len(expected) == 10
    for found_losses, found_weights in others:
        assert found_losses == pytest.approx(expected, abs=1e-5)
        assert found_weights.keys() == weights.keys()
        assert max(float((found_weights[n] - tensor).abs().max()) for n, tensor in weights.items()) < 1e-5


def test_sft_with_other_micro_batches_has_the_same_losses(tiny_inputs):
    usual, other = (
        tiny_inputs.job("sft", settings(), "usual"),
        tiny_inputs.job("sft", settings(micro_tokens=1), "other"),
    )
    tune(usual)
    tune(other)
    assert losses(other) == pytest.approx(losses(usual), abs=1e-5)


def test_sft_events_and_curve_have_the_values_of_the_steps(tiny_inputs, monkeypatch):
    """Of five steps, a curve of three points has every second step, the first and the last."""
    monkeypatch.setattr(run_state, "_CURVE_POINTS", 3)
    job = tiny_inputs.job("sft", settings(epochs=1))
    made = tune(job)
    steps = told(job)
    assert made.details.series["steps"] == [1, 2, 4, 5]
    assert made.details.series["loss"] == [losses(job)[n - 1] for n in (1, 2, 4, 5)]
    assert [e["learning_rate"] for e in steps] == pytest.approx([RATE * f for f in (1, 0.8, 0.6, 0.4, 0.2)])
    assert all(e["grad_norm"] > 0 and math.isfinite(e["loss"]) for e in steps)


def test_sft_resumed_from_checkpoint_gives_the_same_bits(tiny_inputs):
    """A second run with the checkpoints of the first repeats only the steps after the last checkpoint."""
    job = tiny_inputs.job("sft", settings(), checkpoint_every=8)
    first = tune(job)
    before, weights = losses(job), load_file(job.staging / "model.safetensors")
    again = tune(job)
    assert again.fingerprint == first.fingerprint and losses(job) == before
    assert all(torch.equal(weights[n], t) for n, t in load_file(job.staging / "model.safetensors").items())
    [note] = [e["text"] for e in told(job, "note")]
    assert note.startswith("resumed ") and note.endswith(" step 8")


def test_sft_with_batch_larger_than_the_data_writes_a_note(tiny_inputs):
    """38 training pairs: an epoch is one step."""
    job = tiny_inputs.job("sft", settings(batch_size=1000, epochs=2))
    tune(job)
    [note] = [e["text"] for e in told(job, "note")]
    assert "`batch_size` 1,000 " in note and " 38 " in note and len(losses(job)) == 2


def test_sft_without_training_pairs_raises(tmp_path):
    inputs = build_tiny_inputs(tmp_path, train=0, validation=3)
    with pytest.raises(DataError, match=r" 3 tokenized pairs .*\[no-train-pairs\]"):
        tune(inputs.job("sft", settings()))


def test_sft_with_token_outside_the_vocabulary_raises(tiny_inputs):
    tiny_inputs.examples[3]["chosen_ids"][-1] = 10**6
    with pa.ipc.new_stream(str(tiny_inputs.pairs / "pairs.arrow"), PAIRS_SCHEMA) as stream:
        stream.write_table(pa.Table.from_pylist(tiny_inputs.examples, PAIRS_SCHEMA))
    with pytest.raises(TemplateError, match=r" 1,000,000, .* 64: .*\[token-outside-vocabulary\]"):
        tune(tiny_inputs.job("sft", settings()))


def test_sft_with_unknown_adapter_target_of_the_policy_raises(tiny_inputs):
    """The check comes before the tuning, although only the later policy job needs the adapter."""
    recipe = factories.recipe(training={"adapter": {"target_modules": ["q_prj"]}})
    with pytest.raises(ModelError, match=r"'q_prj'.* LlamaForCausalLM .*\[adapter-target\]"):
        tune(tiny_inputs.job("sft", settings()).model_copy(update={"recipe": recipe}))
