"""What `pedigree plan` promises, with counts, and that it runs no model and tells Dagster of nothing."""

import json
import re
import shutil

import pytest

from tests.workflows.homes import ATTRIBUTES, PAIRS, edit, flip
from training.contract.errors import DataError
from training.contract.identity.fingerprint import short
from training.contract.protocol.job import Job
from workflows.commands.plan import plan, sentence
from workflows.state.expected_state import expect_state

pytestmark = pytest.mark.slow


def planned(looking):
    """The plan; what it calls reused is in the store or, a release, in the registry: a run will find it."""
    found = plan(looking.pipeline, looking.services, looking.instance)
    store, foreseen = looking.services.store, expect_state(looking.pipeline, looking.services)
    for name in (asset.asset for asset in found if asset.action == "reuse" and asset.asset != "released_model"):
        assert foreseen[name].fingerprint in store.fingerprints(name)
    return {asset.asset: asset for asset in found}, sentence(found)


def test_untouched_nothing_is_computed(looking):
    """A pointer to the base model that is gone is made for the plan, which knows the reference by it."""
    shutil.rmtree(looking.services.store.root / "keys" / "reference_model")
    assets, words = planned(looking)
    assert {asset.action for asset in assets.values()} == {"reuse"}
    assert words.startswith("would compute nothing; reuses raw_preferences, ")
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS, "missing": 0}


def test_corrupt_records_are_mended_as_a_run_would_mend_them(looking):
    """All of them: what the lower assets would be is known only once the upper ones are mended."""
    for record in (looking.services.store.root / "keys").glob("*/*.json"):
        flip(record)
    assets, _ = planned(looking)
    assert {asset.action for asset in assets.values()} == {"reuse"}


FILE = {"path": "preferences.jsonl"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"max_quarantined": 0.0}, "a run would end here: the check quarantine_within_limit failed: 1 of 161 rows"),
        (
            {"max_quarantined": 0.5, "validation_fraction": 0.0},
            "defs.yaml:6: data.validation_fraction: 0.0: `data.validation_fraction: 0.0` is the share that is held out "
            "of the prompts that no `held_out` source has, and none of the 160 tokenized pairs is in the validation split",
        ),
        (
            {"max_quarantined": 0.5, "sources": [FILE, {**FILE, "held_out": True}]},
            "pairs is in the train split, while policy is part of this run: add data with other prompts",
        ),
    ],
)
def test_what_ends_a_run_before_any_model_ends_the_plan(looking, data, words):
    with open(looking.folder / "preferences.jsonl", "a") as file:
        file.write("{}\n")
    edit(looking, {**ATTRIBUTES, "data": {**ATTRIBUTES["data"], **data}})
    with pytest.raises(DataError, match=re.escape(words)):
        plan(looking.pipeline, looking.services, looking.instance)


def test_another_beta_trains_and_scores_nothing(looking):
    edit(looking, {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}})
    assets, words = planned(looking)
    assert {name for name, a in assets.items() if a.action == "compute"} == {"policy", "evaluation", "released_model"}
    assert assets["policy"].causes == ("training_spec: loss.beta 0.1 -> 0.2",)
    assert assets["policy"].work["steps"] == 12
    assert words.startswith("would train 12 steps, evaluate, decide on the release; reuses ")


def test_the_steps_that_an_interrupted_run_saved_are_told(looking):
    """The files are as in a checkpoint. One that was not written to its end counts no more than other data's."""
    edit(looking, {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}})
    key = short(expect_state(looking.pipeline, looking.services)["policy"].derivation.key)
    for of, name in (
        (key, "step-00000004"),
        (key, "step-00000008"),
        (key, "step-00000012.partial"),
        ("0" * 12, "step-9"),
    ):
        (looking.home / "jobs" / f"policy-{key}" / "checkpoints" / of / name).mkdir(parents=True)
    assets, words = planned(looking)
    assert (assets["policy"].work["steps"], assets["policy"].work["done"]) == (12, 8)
    assert words.startswith("would train 12 steps (8 of them are done), evaluate, ")


def test_in_another_dtype_every_sequence_is_scored_again_and_every_epoch_trained(looking):
    training = {**ATTRIBUTES["training"], "max_steps": None, "epochs": 3}
    edit(looking, {**ATTRIBUTES, "reference": {"model": "./base", "dtype": "bfloat16"}, "training": training})
    assets, _ = planned(looking)
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS, "missing": 2 * PAIRS}
    work = assets["policy"].work
    assert work["pairs"] < PAIRS and work["steps"] == 3 * -(-work["pairs"] // 16)


def test_new_rows_are_counted_as_they_will_be_scored(looking):
    """Three rows more: one repeats a row, one shares a chosen response with a row, one is all new. 3 sequences to score."""
    path = looking.folder / "preferences.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    answer = [{"role": "assistant", "content": "It is a new answer."}]
    other = [{"role": "assistant", "content": "It is another answer."}]
    more = [rows[0], {**rows[1], "rejected": answer}, {**rows[2], "chosen": answer, "rejected": other}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + more))
    jobs = {path.parent.name for path in (looking.home / "jobs").glob("*/job.json")}
    known = looking.instance.get_latest_materialization_event(looking.pipeline.key("raw_preferences"))
    assets, words = planned(looking)
    work = assets["raw_preferences"].work
    assert (work["rows"], work["added"], work["removed"]) == (PAIRS + 3, 3, 0)
    assert assets["reference_logprobs"].action == "compute"
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS + 3, "missing": 3}
    assert assets["reference_logprobs"].causes == (
        "preference_source: preferences.jsonl differs (160 -> 163 rows read)",
    )
    assert assets["tokenized_pairs"].action == "reuse", "it was made for the plan, so a run finds it"
    assert words.startswith(f"would score 3 of {2 * PAIRS + 3} sequences, train 12 steps")
    new = [p for p in (looking.home / "jobs").glob("*/job.json") if p.parent.name not in jobs]
    assert {Job.read(path).kind for path in new} == {"preferences", "pairs"}
    assert looking.instance.get_latest_materialization_event(looking.pipeline.key("raw_preferences")) == known


def test_a_reference_that_has_still_to_be_tuned_knows_no_sequence(looking):
    sft = {"epochs": 3, "batch_size": 50}
    edit(looking, {**ATTRIBUTES, "reference": {"model": "./base", "sft": sft}})
    assets, words = planned(looking)
    train = assets["policy"].work["pairs"]
    assert assets["reference_model"].work == {"steps": 3 * -(-train // 50), "pairs": train}
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS, "missing": 2 * PAIRS}
    assert words.startswith("would tune the reference model for 9 steps, score ")
