"""The causes of `pedigree status`: every kind of change to a recipe that was materialized."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from assets.lineage.settings_diff import setting_changes
from assets.pipeline.graph import GRAPH
from tests.workflows.homes import ATTRIBUTES, Checkout, check_out, check_values, edit, flip
from workflows.state.status import LOST, NEVER, status

pytestmark = pytest.mark.slow  # shares one run of the small recipe with other tests

BELOW_PAIRS = ["reference_logprobs", "policy", "evaluation", "released_model"]


@pytest.fixture
def checkout(materialized, small_recipe, tmp_path):
    found = check_out(materialized[0], small_recipe, tmp_path)
    with found.instance:
        yield found


def states(checkout: Checkout) -> dict[str, tuple[str, list[str]]]:
    return {a.asset: (a.state, list(a.causes)) for a in status(checkout.pipeline, checkout.services, checkout.instance)}


def stale(checkout: Checkout) -> dict[str, list[str]]:
    return {asset: causes for asset, (state, causes) in states(checkout).items() if state == "stale"}


def change_json(checkout: Checkout, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = checkout.folder / "base" / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_recipe_that_was_never_run_is_missing(checkout):
    with dg.DagsterInstance.ephemeral() as instance:
        found = status(checkout.pipeline, checkout.services, instance)
    assert {(a.state, a.causes) for a in found} == {("missing", (NEVER,))}


def test_changed_field_of_training_is_a_cause_of_every_asset_below(checkout):
    edit(checkout, {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}}})
    change = "loss.beta 0.1 -> 0.2"
    both = [f"training_spec: {change}", f"evaluation_spec: {change}"]
    assert stale(checkout) == {
        "training_spec": [change],
        "evaluation_spec": [change],
        "policy": both[:1],
        "evaluation": both,
        "released_model": both,
    }


def test_a_changed_line_of_the_template(checkout):
    path = checkout.folder / "base" / "chat_template.jinja"
    lines = path.read_text().splitlines()
    lines[3] += " "
    path.write_text("\n".join(lines) + "\n")
    found = stale(checkout)
    first, removed, added = found["tokenization_spec"][0].splitlines()
    check_values(first, "chat template ", "line 4")
    assert (removed.strip(), added.strip()) == (f"-{lines[3].rstrip()}", f"+{lines[3]}".strip())
    assert len(found["tokenization_spec"]) == 1
    change = f"tokenization_spec: {found['tokenization_spec'][0]}"
    for asset in ("tokenized_pairs", *BELOW_PAIRS):
        cause, *shipped = found[asset]
        assert cause == change and len(shipped) == (asset == "released_model")
    check_values(found["released_model"][1], "release_spec: chat_template.jinja ")


def gain(content):
    id_ = max(content["model"]["vocab"].values()) + 1
    token = {"id": id_, "content": "<|tool|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append({**token, **flags})


def lose(content):
    content["model"]["vocab"].pop(max(content["model"]["vocab"], key=content["model"]["vocab"].get))


def merge(content):
    content["model"]["merges"].pop()


def swap(content):
    vocabulary = content["model"]["vocab"]
    (first, one), (second, two) = list(vocabulary.items())[-2:]
    vocabulary.update({first: two, second: one})


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (gain, r"tokenizer gained .*<\|tool\|>"),
        (lose, r"tokenizer lost "),
        (merge, r"tokenizer merges .*\d -> \d"),
        (swap, r"tokenizer moved .*\(id \d+ -> \d+\)"),
    ],
)
def test_a_changed_tokenizer(checkout, change, cause):
    change_json(checkout, "tokenizer.json", change)
    assert re.match(cause, stale(checkout)["tokenization_spec"][0])
    assert re.search("tokenization_spec: " + cause, stale(checkout)["tokenized_pairs"][0])


def test_a_changed_special_token(checkout):
    change_json(checkout, "tokenizer_config.json", lambda c: c.update(eos_token="<|user|>"))
    [cause] = stale(checkout)["tokenization_spec"]
    check_values(cause, "eos_token <|end|> (id ", "-> <|user|> (id ")


def test_a_changed_rule_of_tokenization(checkout):
    edit(checkout, {**ATTRIBUTES, "tokenization": {"max_length": 64, "template_kwargs": {"deep": True}}})
    assert stale(checkout)["tokenization_spec"] == ["max_length 128 -> 64", "template_kwargs.deep absent -> true"]


def test_changed_weights(checkout):
    flip(checkout.folder / "base" / "model.safetensors")
    found = stale(checkout)
    [change] = found["base_model"]
    assert change.startswith("model.safetensors ")
    for asset in ("reference_model", *BELOW_PAIRS):
        assert found[asset] == [f"base_model: {change}"]
    assert "tokenized_pairs" not in found


def test_a_changed_config(checkout):
    change_json(checkout, "config.json", lambda c: c["rope_parameters"].update(rope_theta=500000.0))
    [cause] = stale(checkout)["base_model"]
    assert cause.startswith("config ") and cause.endswith("rope_theta 10000.0 -> 500000.0")


def test_changed_data(checkout):
    path = checkout.folder / "preferences.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    found = stale(checkout)
    [change] = found.pop("preference_source")
    check_values(change, "preferences.jsonl ", "160 -> 161 rows")
    assert set(found) == {"raw_preferences", "tokenized_pairs", "prequential_scores", *BELOW_PAIRS}
    assert {tuple(causes) for causes in found.values()} == {(f"preference_source: {change}",)}


def test_files_that_come_go_and_are_renamed(checkout):
    path = checkout.folder / "preferences.jsonl"
    path.rename(checkout.folder / "renamed.jsonl")
    edit(checkout, {**ATTRIBUTES, "data": {**ATTRIBUTES["data"], "sources": [{"path": "renamed.jsonl"}]}})
    assert stale(checkout) == {}
    shutil.copy(checkout.folder / "renamed.jsonl", path)
    edit(checkout, {**ATTRIBUTES, "data": {**ATTRIBUTES["data"], "sources": [{"path": "*.jsonl"}]}})
    assert stale(checkout)["preference_source"] == ["renamed.jsonl added"]


def test_supervised_tuning_switched_on(checkout):
    edit(checkout, {**ATTRIBUTES, "reference": {"model": "./base", "sft": {"epochs": 1}}})
    causes = stale(checkout)["reference_model"]
    assert "epochs absent -> 1" in causes and any(cause.startswith("tokenized_pairs ") for cause in causes)


@pytest.mark.parametrize("asset", ["tokenization_spec", "raw_preferences"])
def test_another_version_of_an_algorithm(checkout, monkeypatch, asset):
    change = f"code version {GRAPH[asset].version} -> another"
    monkeypatch.setitem(GRAPH, asset, replace(GRAPH[asset], version="another"))
    found = stale(checkout)
    assert (found[asset], found["tokenized_pairs"]) == ([change], [f"{asset}: {change}"])


def test_removed_input_is_a_cause(checkout, monkeypatch):
    needs = tuple(name for name in GRAPH["evaluation"].needs if name != "reference_model")
    monkeypatch.setitem(GRAPH, "evaluation", replace(GRAPH["evaluation"], needs=needs))
    found = stale(checkout)
    [change] = found["evaluation"]
    assert change.startswith("reference_model ") and "input" in change
    assert found == {"evaluation": [change], "released_model": [f"evaluation: {change}"]}


def test_changed_gate_is_a_cause_of_the_release_alone(checkout):
    edit(checkout, {**ATTRIBUTES, "release": {"model_name": "small", "gate": {"min_accuracy": 0.25}}})
    assert stale(checkout) == {"released_model": ["gate.min_accuracy null -> 0.25"]}


def test_missing_and_corrupt_artifacts_are_causes(materialized, small_recipe, tmp_path):
    home, report = materialized
    found = check_out(home, small_recipe, tmp_path, copy_home=True)
    fingerprints = {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}
    shutil.rmtree(found.home / "store" / "reference_logprobs" / fingerprints["reference_logprobs"])
    path = found.home / "store" / "raw_preferences" / fingerprints["raw_preferences"] / "preferences.parquet"
    flip(path)
    with found.instance:
        causes = stale(found)
    [cause] = causes["raw_preferences"]
    check_values(cause, "file preferences.parquet ", "corrupt")
    assert causes["policy"] == [f"raw_preferences: {cause}"]
    flip(path)  # undo it
    with dg.DagsterInstance.from_config(str(found.home / "dagster")) as instance:
        found.instance = instance
        causes = stale(found)
        shutil.rmtree(found.home / "store" / "tokenization_spec" / fingerprints["tokenization_spec"])
        later = stale(found)
    assert later["tokenization_spec"] == causes["reference_logprobs"] == [LOST]
    assert causes["released_model"] == [f"reference_logprobs: {LOST}"]
    assert "raw_preferences" not in causes


def test_new_section_is_one_cause():
    loss = {"type": "sigmoid", "smoothing": 0.0}
    before = {"adapter": None, "loss": loss, "sources": [{"split": "train"}], "kept": {}}
    now = {
        "adapter": {"type": "lora", "rank": 16},
        "loss": {"type": "mixture", "of": [{"type": "ipo"}]},
        "sources": [{"split": "all"}],
        "kept": {"word": "absent"},
    }
    assert list(setting_changes(before, now)) == [
        "adapter null -> {type: lora, rank: 16}",
        "kept.word absent -> absent",
        "loss.of absent -> [{type: ipo}]",
        "loss.smoothing 0.0 -> absent",
        "loss.type sigmoid -> mixture",
        "sources[0].split train -> all",
    ]
