"""A policy that starts as the champion, while its reference stays what the recipe says."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.runs import losses, naive_losses, settings, shift_reference, told, tune
from tests.training.worlds import VOCABULARY, write_tokenizer
from training.contract.errors import TrainingError
from training.contract.identity.tokenizer_files import tokenizer_files
from training.contract.protocol.job import Job


@pytest.fixture
def champion(tiny_world) -> tuple[Path, str]:
    """A policy that was trained before, and its fingerprint."""
    job = tiny_world.job("policy", settings(max_steps=4), "before")
    return job.staging, tune(job).fingerprint


def starting_from(world: Any, champion: tuple[Path, str], **changes: Any) -> Job:
    job = world.job("policy", settings(start_from="champion", **changes) | {"champion": champion[1]}, "after")
    job = job.model_copy(update={"locations": {"champion": str(champion[0])}})
    job.staging.mkdir(parents=True, exist_ok=True)
    return job


def test_it_goes_on_from_the_champion_against_the_same_reference(tiny_world, champion):
    job = starting_from(tiny_world, champion)
    made = tune(job)
    expected = list(naive_losses(tiny_world, 12, AutoModelForCausalLM.from_pretrained(champion[0])))
    assert losses(job) == pytest.approx(expected, abs=1e-5)
    assert expected[0] < math.log(2) - 0.01, "it has learned something before"
    assert told(job, "eval")[0]["eval/rewards/margins"] != pytest.approx(0, abs=1e-3)
    assert made.details["step0_loss"] == pytest.approx(math.log(2), abs=1e-5), "of the reference model"


@pytest.mark.parametrize(("row", "where"), [(40, "held-out pairs"), (0, "row 100")])
def test_the_table_is_still_proven(tiny_world, champion, row: int, where: str):
    shift_reference(tiny_world, row, 0.5)
    job = starting_from(tiny_world, champion)
    with pytest.raises(TrainingError, match=rf"{where}(.|\n)*1 of \d+ pairs|1 of \d+ pairs(.|\n)*{where}"):
        tune(job)
    assert told(job) == []


def test_a_run_that_goes_on_proves_nothing_again(tiny_world, champion):
    """Its first attempt did, and the table is the same: no second model is loaded. Without a checkpoint it begins anew."""
    job = starting_from(tiny_world, champion, max_steps=2)
    job = job.model_copy(update={"compute": job.compute.model_copy(update={"checkpoint_every": 2})})
    before = tune(job).details
    shift_reference(tiny_world, 0, 0.5)
    again = tune(job).details
    assert again["seconds"]["proof"] == before["seconds"]["proof"] > 0
    assert [e["phase"] for e in told(job, "phase")].count("reference check") == 1
    shutil.rmtree(job.checkpoints)
    with pytest.raises(TrainingError, match="row 100"):
        tune(job)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["w0", "w2", "w1", *(f"w{n}" for n in range(3, VOCABULARY))], "2 of the 64 .*first 'w1'"),
        ([f"w{n}" for n in range(40)], "24 of the 64 .*first 'w40'"),
    ],
    ids=["other numbers", "fewer"],
)
def test_a_champion_to_which_tokens_mean_others_is_refused(tiny_world, champion, words: list[str], says: str):
    write_tokenizer(champion[0], words)
    with pytest.raises(TrainingError, match=says):
        tune(starting_from(tiny_world, champion))


def test_a_champion_that_knows_more_tokens_will_do(tiny_world, champion):
    write_tokenizer(champion[0], [f"w{n}" for n in range(VOCABULARY + 3)])
    job = starting_from(tiny_world, champion, max_steps=1)
    tune(job)
    assert len(losses(job)) == 1


def test_a_champion_of_another_program_may_hold_the_model_alone(tiny_world, champion):
    for name in tokenizer_files(champion[0]):
        (champion[0] / name).unlink()
    job = starting_from(tiny_world, champion, max_steps=1)
    tune(job)
    assert len(losses(job)) == 1


def test_a_champion_that_holds_the_model_alone_is_refused_if_it_lacks_tokens(tiny_world, champion):
    """One of the world's 64: the pairs have it, the last of them."""
    for file in champion[0].iterdir():
        file.unlink()
    config = AutoConfig.from_pretrained(tiny_world.model, vocab_size=VOCABULARY - 1)
    AutoModelForCausalLM.from_config(config).save_pretrained(champion[0])
    job = starting_from(tiny_world, champion)
    message = rf"up to 63, and the champion in {champion[0]} has 63 tokens: .*`training.start_from: reference`"
    with pytest.raises(TrainingError, match=message + r".* \[champion-tokenizer\]$"):
        tune(job)
    assert told(job, "eval") == []


def test_an_adapter_on_the_champion_is_merged_into_the_champion(tiny_world, champion):
    job = starting_from(tiny_world, champion, adapter={"rank": 2}, optimizer={"learning_rate": 1e-9})
    tune(job)
    model = AutoModelForCausalLM.from_pretrained(job.staging).eval()
    example = tiny_world.split("validation")[0]
    before = tiny_world.plain_logprob(AutoModelForCausalLM.from_pretrained(champion[0]).eval(), example, "chosen")
    assert float(tiny_world.plain_logprob(model, example, "chosen")) == pytest.approx(float(before), abs=1e-3)


def test_without_a_champion_it_starts_as_the_reference(tiny_world):
    plain, none = (
        tiny_world.job("policy", settings(), "plain"),
        tiny_world.job("policy", settings(start_from="champion") | {"champion": None}, "none"),
    )
    assert tune(plain).fingerprint == tune(none).fingerprint
