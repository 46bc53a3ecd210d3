"""The variants of a recipe's file, compared with the rules of JSON Merge Patch and with results by hand."""

from typing import Any

import pytest
from pydantic import ValidationError

from training.contract.config.recipe import Automation, Recipe
from training.contract.config.variants import RecipeDocument, merged

OWN: dict[str, Any] = {
    "data": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "validation_fraction": 0.2},
    "reference": {"model": "./base", "sft": {"epochs": 2}},
    "training": {
        "loss": {"type": "robust", "beta": 0.3, "label_smoothing": 0.1},
        "optimizer": {"learning_rate": "5e-7", "betas": [0.9, 0.95]},
        "adapter": {"rank": 8},
    },
    "release": {"model_name": "demo", "gate": {"min_accuracy": 0.6}},
    "automation": {"cron": "0 6 * * 1", "timezone": "Europe/Berlin"},
}


def variant(changes: dict[str, Any]) -> Recipe:
    return RecipeDocument.model_validate({**OWN, "variants": {"x": changes}}).resolved()["x"]


@pytest.mark.parametrize(
    ("section", "changes", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d"}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b"}, {"a": "b"}),
    ],
)
def test_merged_agrees_with_appendix_a_of_rfc_7396(section, changes, result):
    """The examples of the RFC, without the three with null for a missing field."""
    assert merged(section, changes) == result


def test_merged_does_not_change_its_argument():
    section = {"a": {"b": 1}}
    merged(section, {"a": {"b": 2, "c": 3}})
    assert section == {"a": {"b": 1}}


def test_recipe_of_a_document_lacks_the_variants():
    file = RecipeDocument.model_validate({**OWN, "variants": {"x": {"training": {"seed": 1}}}})
    assert file.recipe == Recipe.model_validate(OWN)
    assert type(file.recipe) is Recipe and "variants" not in file.recipe.model_dump()


def test_variant_changes_only_its_fields():
    """Sections are merged: smoothing and the learning rate stay. The list of sources is replaced."""
    found = variant({"training": {"loss": {"beta": 0.5}, "seed": 7}, "data": {"sources": [{"path": "c.jsonl"}]}})
    own = Recipe.model_validate(OWN)
    assert found.training.loss == own.training.loss.model_copy(update={"beta": 0.5})
    assert (found.training.seed, found.training.optimizer) == (7, own.training.optimizer)
    assert [source.path for source in found.data.sources] == ["c.jsonl"]
    assert found.data.validation_fraction == 0.2
    assert (found.tokenization, found.reference, found.compute) == (own.tokenization, own.reference, own.compute)


def test_null_in_a_variant_restores_the_default():
    found = variant({"training": {"loss": {"type": "hinge", "label_smoothing": None}, "adapter": None}})
    assert (found.training.loss.type, found.training.loss.beta) == ("hinge", 0.3)
    assert found.training.adapter is None and found.training.optimizer.model_dump()["betas"] == (0.9, 0.95)
    assert variant({"training": None}).training == Recipe.model_fields["training"].default


def test_variant_by_default_has_no_automation_and_its_own_model():
    plain = variant({})
    assert (plain.automation.cron, plain.automation.on_change) == (None, False)
    assert (plain.release.model_name, plain.release.gate.min_accuracy) == ("demo-x", 0.6)
    changed = variant({"release": {"model_name": "demo"}, "automation": {"cron": "0 7 * * 1", "on_change": True}})
    assert changed.release.model_name == "demo"
    assert (changed.automation.cron, changed.automation.on_change) == ("0 7 * * 1", True)


def test_null_does_not_enable_the_automation_of_a_variant():
    """The default of a recipe's `on_change` is true: with it, null would cause unwanted runs."""
    for changes in ({"automation": None}, {"automation": {"timezone": None}}):
        assert variant(changes).automation == Automation(on_change=False)
    with pytest.raises(ValidationError, match="on_change"):
        variant({"automation": {"on_change": None}})


def test_schedule_of_a_variant_has_the_time_zone_of_the_recipe():
    assert variant({"automation": {"cron": "0 7 * * 1"}}).automation.timezone == "Europe/Berlin"


@pytest.mark.parametrize(
    ("variants", "path"),
    [
        ({"x": {"training": {"los": {}}}}, ("variants", "x", "training", "los")),
        ({"x": {"training": {"los": None}}}, ("variants", "x", "training", "los")),
        ({"x": {"training": {"loss": {"type": "hinge"}}}}, ("variants", "x", "training", "loss")),
        ({"x": {"release": {"model_name": None}}}, ("variants", "x", "release", "model_name")),
        ({"x": {"variants": {"y": {}}}}, ("variants", "x", "variants")),
        ({"x": {"automation": 3}}, ("variants", "x", "automation")),
        ({"x": None}, ("variants", "x")),
        ({"x": {}, "a b": {}}, ("variants", "a b", "[key]")),
        ([{"x": {}}], ("variants",)),
    ],
)
def test_error_in_a_variant_has_its_path_in_the_file(variants, path):
    with pytest.raises(ValidationError) as error:
        RecipeDocument.model_validate({**OWN, "variants": variants})
    assert [details["loc"] for details in error.value.errors()] == [path]


def test_error_in_the_recipe_is_reported_once():
    with pytest.raises(ValidationError) as error:
        RecipeDocument.model_validate({**OWN, "evaluation": {"sample": 1}, "variants": {"x": {}, "y": {}}})
    assert [details["loc"] for details in error.value.errors()] == [("evaluation", "sample")]
