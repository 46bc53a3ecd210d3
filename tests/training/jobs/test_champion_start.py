"""A policy that starts from the champion, with the reference model of the recipe."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests import factories
from tests.training.runs import losses, naive_losses, settings, shift_reference, told, tune
from tests.training.tiny_inputs import VOCABULARY
from training.contract.errors import TrainingError
from training.contract.identity.tokenizer_files import tokenizer_files
from training.contract.protocol.job import Job
from training.contract.protocol.locations import PolicyLocations


@pytest.fixture
def champion(tiny_inputs) -> tuple[Path, str]:
    """Train a policy as the champion. Return its folder and fingerprint."""
    job = tiny_inputs.job("policy", settings(max_steps=4), "before")
    return job.staging, tune(job).fingerprint


def starting_from(inputs: Any, champion: tuple[Path, str], **changes: Any) -> Job:
    job = inputs.job("policy", settings(start_from="champion", **changes) | {"champion": champion[1]}, "after")
    job = job.model_copy(update={"locations": PolicyLocations(champion=champion[0])})
    job.staging.mkdir(parents=True, exist_ok=True)
    return job


def test_policy_from_champion_matches_a_naive_loop_with_the_reference(tiny_inputs, champion):
    job = starting_from(tiny_inputs, champion)
    made = tune(job)
    expected = list(naive_losses(tiny_inputs, 12, AutoModelForCausalLM.from_pretrained(champion[0])))
    assert losses(job) == pytest.approx(expected, abs=1e-5)
    assert expected[0] < math.log(2) - 0.01, "it has learned something before"
    assert told(job, "eval")[0]["eval/rewards/margins"] != pytest.approx(0, abs=1e-3)
    assert made.details.step0_loss == pytest.approx(math.log(2), abs=1e-5), "of the reference model"


@pytest.mark.parametrize(("row", "where"), [(40, "held-out pairs"), (0, "row 100")])
def test_policy_from_champion_with_wrong_table_raises(tiny_inputs, champion, row: int, where: str):
    shift_reference(tiny_inputs, row, 0.5)
    job = starting_from(tiny_inputs, champion)
    message = rf"(?s)({where}.*1 of \d+ pairs|1 of \d+ pairs.*{where}).*\[reference-check-failed\]"
    with pytest.raises(TrainingError, match=message):
        tune(job)
    assert told(job) == []


def test_resumed_policy_from_champion_skips_the_reference_check(tiny_inputs, champion):
    """The first attempt has checked the same table. Without a checkpoint the run starts again and checks again."""
    job = starting_from(tiny_inputs, champion, max_steps=2)
    job = job.model_copy(update={"compute": job.compute.model_copy(update={"checkpoint_every": 2})})
    before = tune(job).details
    shift_reference(tiny_inputs, 0, 0.5)
    again = tune(job).details
    assert again.seconds["proof"] == before.seconds["proof"] > 0
    assert [e["phase"] for e in told(job, "phase")].count("reference check") == 1
    shutil.rmtree(job.checkpoints)
    with pytest.raises(TrainingError, match="row 100"):
        tune(job)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["w0", "w2", "w1", *(f"w{n}" for n in range(3, VOCABULARY))], "2 of the 64 .*'w1'"),
        ([f"w{n}" for n in range(40)], "24 of the 64 .*'w40'"),
    ],
    ids=["other numbers", "fewer"],
)
def test_policy_from_champion_with_other_token_ids_raises(tiny_inputs, champion, words: list[str], message: str):
    factories.word_tokenizer(words).save_pretrained(champion[0])
    with pytest.raises(TrainingError, match=rf"{message}.*\[champion-tokenizer\]"):
        tune(starting_from(tiny_inputs, champion))


def test_policy_from_champion_with_more_tokens_trains(tiny_inputs, champion):
    factories.word_tokenizer([f"w{n}" for n in range(VOCABULARY + 3)]).save_pretrained(champion[0])
    job = starting_from(tiny_inputs, champion, max_steps=1)
    tune(job)
    assert len(losses(job)) == 1


def test_policy_from_champion_without_tokenizer_trains(tiny_inputs, champion):
    """Another program may have registered the model alone."""
    for name in tokenizer_files(champion[0]):
        (champion[0] / name).unlink()
    job = starting_from(tiny_inputs, champion, max_steps=1)
    tune(job)
    assert len(losses(job)) == 1


def test_policy_from_champion_with_small_vocabulary_raises(tiny_inputs, champion):
    """It lacks the last of the 64 tokens, and the pairs contain this token."""
    for file in champion[0].iterdir():
        file.unlink()
    config = AutoConfig.from_pretrained(tiny_inputs.model, vocab_size=VOCABULARY - 1)
    AutoModelForCausalLM.from_config(config).save_pretrained(champion[0])
    job = starting_from(tiny_inputs, champion)
    message = rf" 63, .*{champion[0]} has 63 tokens.*`training.start_from: reference`.*\[champion-tokenizer\]$"
    with pytest.raises(TrainingError, match=message):
        tune(job)
    assert told(job, "eval") == []


def test_policy_from_champion_with_adapter_is_merged_into_the_champion(tiny_inputs, champion):
    job = starting_from(tiny_inputs, champion, adapter={"rank": 2}, optimizer={"learning_rate": 1e-9})
    tune(job)
    model = AutoModelForCausalLM.from_pretrained(job.staging).eval()
    example = tiny_inputs.split("validation")[0]
    before = tiny_inputs.plain_logprob(AutoModelForCausalLM.from_pretrained(champion[0]).eval(), example, "chosen")
    assert float(tiny_inputs.plain_logprob(model, example, "chosen")) == pytest.approx(float(before), abs=1e-3)


def test_policy_without_champion_starts_from_the_reference(tiny_inputs):
    plain, none = (
        tiny_inputs.job("policy", settings(), "plain"),
        tiny_inputs.job("policy", settings(start_from="champion") | {"champion": None}, "none"),
    )
    assert tune(plain).fingerprint == tune(none).fingerprint
