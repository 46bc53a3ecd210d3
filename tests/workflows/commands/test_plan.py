"""`pedigree plan`: its counts come true, it runs no model, and it reports nothing to Dagster."""

import json
import shutil

import pytest

from tests.workflows.homes import ATTRIBUTES, PAIRS, check_error, check_values, edit, flip
from training.contract.errors import DataError
from training.contract.identity.fingerprint import short
from training.contract.protocol.job import Job
from workflows.commands.plan import plan, sentence
from workflows.state.expected_state import expect_state

pytestmark = pytest.mark.slow


def planned(checkout):
    """Return the plan. Every reused artifact must be in the store or, for a release, in the registry."""
    found = plan(checkout.pipeline, checkout.services, checkout.instance)
    store, foreseen = checkout.services.store, expect_state(checkout.pipeline, checkout.services)
    for name in (asset.asset for asset in found if asset.action == "reuse" and asset.asset != "released_model"):
        assert foreseen[name].fingerprint in store.fingerprints(name)
    return {asset.asset: asset for asset in found}, sentence(found)


def test_untouched_nothing_is_computed(checkout):
    """The plan remakes a missing pointer to the base model: the pointer names the reference."""
    shutil.rmtree(checkout.services.store.root / "keys" / "reference_model")
    assets, summary = planned(checkout)
    assert {asset.action for asset in assets.values()} == {"reuse"}
    check_values(summary, "nothing", "reuses raw_preferences, ")
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS, "missing": 0}


def test_plan_repairs_corrupt_records_as_a_run_does(checkout):
    """Every record: lower assets are known only after the upper ones are repaired."""
    for record in (checkout.services.store.root / "keys").glob("*/*.json"):
        flip(record)
    assets, _ = planned(checkout)
    assert {asset.action for asset in assets.values()} == {"reuse"}


FILE = {"path": "preferences.jsonl"}


@pytest.mark.parametrize(
    ("data", "code", "values"),
    [
        ({"max_quarantined": 0.0}, "check-failed", ["quarantine_within_limit", " 1 of 161 rows"]),
        (
            {"max_quarantined": 0.5, "validation_fraction": 0.0},
            "empty-split",
            ["defs.yaml:6: data.validation_fraction: 0.0: ", " 160 ", "validation split"],
        ),
        (
            {"max_quarantined": 0.5, "sources": [FILE, {**FILE, "held_out": True}]},
            "empty-split",
            ["train split", " policy "],
        ),
    ],
)
def test_problem_that_ends_a_run_early_ends_the_plan(checkout, data, code, values):
    with open(checkout.folder / "preferences.jsonl", "a") as file:
        file.write("{}\n")
    edit(checkout, {**ATTRIBUTES, "data": {**ATTRIBUTES["data"], **data}})
    with pytest.raises(DataError) as caught:
        plan(checkout.pipeline, checkout.services, checkout.instance)
    check_error(caught.value, code, *values)


def test_another_beta_trains_and_scores_nothing(checkout):
    edit(checkout, {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}})
    assets, summary = planned(checkout)
    assert {name for name, a in assets.items() if a.action == "compute"} == {"policy", "evaluation", "released_model"}
    assert assets["policy"].causes == ("training_spec: loss.beta 0.1 -> 0.2",)
    assert assets["policy"].work["steps"] == 12
    check_values(summary, " 12 steps, evaluate, ", " release; reuses ")


def test_plan_shows_saved_steps_of_an_interrupted_run(checkout):
    """Checkpoints that are incomplete, or belong to other data, do not count."""
    edit(checkout, {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}})
    key = short(expect_state(checkout.pipeline, checkout.services)["policy"].derivation.key)
    for of, name in (
        (key, "step-00000004"),
        (key, "step-00000008"),
        (key, "step-00000012.partial"),
        ("0" * 12, "step-9"),
    ):
        (checkout.home / "jobs" / f"policy-{key}" / "checkpoints" / of / name).mkdir(parents=True)
    assets, summary = planned(checkout)
    assert (assets["policy"].work["steps"], assets["policy"].work["done"]) == (12, 8)
    check_values(summary, " 12 steps (8 ", "evaluate, ")


def test_in_another_dtype_every_sequence_is_scored_again_and_every_epoch_trained(checkout):
    training = {**ATTRIBUTES["training"], "max_steps": None, "epochs": 3}
    edit(checkout, {**ATTRIBUTES, "reference": {"model": "./base", "dtype": "bfloat16"}, "training": training})
    assets, _ = planned(checkout)
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS, "missing": 2 * PAIRS}
    work = assets["policy"].work
    assert work["pairs"] < PAIRS and work["steps"] == 3 * -(-work["pairs"] // 16)


def test_new_rows_are_counted_as_they_will_be_scored(checkout):
    """Three more rows: one repeats a row, one shares a chosen response with a row, one is all new. 3 sequences to score."""
    path = checkout.folder / "preferences.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    answer = [{"role": "assistant", "content": "It is a new answer."}]
    other = [{"role": "assistant", "content": "It is another answer."}]
    more = [rows[0], {**rows[1], "rejected": answer}, {**rows[2], "chosen": answer, "rejected": other}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + more))
    jobs = {path.parent.name for path in (checkout.home / "jobs").glob("*/job.json")}
    known = checkout.instance.get_latest_materialization_event(checkout.pipeline.key("raw_preferences"))
    assets, summary = planned(checkout)
    work = assets["raw_preferences"].work
    assert (work["rows"], work["added"], work["removed"]) == (PAIRS + 3, 3, 0)
    assert assets["reference_logprobs"].action == "compute"
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS + 3, "missing": 3}
    [cause] = assets["reference_logprobs"].causes
    check_values(cause, "preference_source: preferences.jsonl ", "160 -> 163 rows")
    assert assets["tokenized_pairs"].action == "reuse", "the plan made it, so a run reuses it"
    check_values(summary, f" 3 of {2 * PAIRS + 3} sequences, ", " 12 steps")
    new = [p for p in (checkout.home / "jobs").glob("*/job.json") if p.parent.name not in jobs]
    assert {Job.read(path).kind for path in new} == {"preferences", "pairs"}
    assert checkout.instance.get_latest_materialization_event(checkout.pipeline.key("raw_preferences")) == known


def test_plan_of_an_untuned_reference_counts_no_sequences(checkout):
    sft = {"epochs": 3, "batch_size": 50}
    edit(checkout, {**ATTRIBUTES, "reference": {"model": "./base", "sft": sft}})
    assets, summary = planned(checkout)
    train = assets["policy"].work["pairs"]
    assert assets["reference_model"].work == {"steps": 3 * -(-train // 50), "pairs": train}
    assert assets["reference_logprobs"].work == {"sequences": 2 * PAIRS, "missing": 2 * PAIRS}
    check_values(summary, "reference model", " 9 steps, score ")
