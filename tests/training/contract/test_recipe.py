"""What a person may write, what it becomes, and what is said of a mistake."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from training.contract.recipe import Recipe

SHORT: dict[str, Any] = {
    "data": {"sources": [{"path": "preferences.jsonl"}]},
    "reference": {"model": "../base"},
    "release": {"model_name": "demo"},
}


def recipe(text: str) -> Recipe:
    return Recipe.model_validate(SHORT | yaml.safe_load(text))


def test_a_short_recipe_is_completed():
    """The defaults that the documentation promises."""
    made = Recipe.model_validate(SHORT)
    assert made.training.loss.model_dump() == {"type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0}
    assert (made.training.batch_size, made.training.micro_tokens, made.training.optimizer.learning_rate) == (
        64,
        16384,
        5e-7,
    )
    assert (made.tokenization.train_on, made.tokenization.max_length, made.tokenization.over_length) == (
        "last_response",
        1024,
        "drop",
    )
    assert (made.data.validation_fraction, made.data.max_quarantined) == (0.1, 0.05)
    assert Recipe.model_validate(made.model_dump(mode="json")) == made, "a resolved recipe resolves to itself"


def test_without_an_adapter_a_recipe_is_what_it_was_before_there_were_any():
    """Its key is sha256 of this, so it must stay `null`; an adapter is completed like everything else."""
    assert recipe("training: {}").training.model_dump(mode="json")["adapter"] is None
    assert recipe("training: {adapter: {type: lora}}").training.model_dump(mode="json")["adapter"] == {
        "type": "lora",
        "rank": 16,
        "alpha": 32,
        "dropout": 0.0,
        "target_modules": "all-linear",
        "export": "merged",
    }


@pytest.mark.parametrize("text", ["5e-7", "5.0e-7", "0.0000005", "5E-7", "'5e-7'"])
def test_a_number_is_a_number_however_it_is_written(text):
    """YAML 1.1 reads `5e-7`, without a point, as text."""
    assert recipe(f"training: {{optimizer: {{learning_rate: {text}}}}}").training.optimizer.learning_rate == 5e-7


def test_the_schema_takes_numbers_as_text_too():
    schema = Recipe.model_json_schema()["$defs"]["Optimizer"]["properties"]["learning_rate"]
    assert {"number", "string"} == {kind["type"] for kind in schema["anyOf"]}


MISTAKES = [
    ("training: {lerning_rate: 1}", "training.lerning_rate", "not permitted"),
    ("training: {batch_size: 0}", "training.batch_size", "greater than or equal to 1"),
    ("training: {batch_size: 1.5}", "training.batch_size", "integer"),
    ("training: {loss: {beta: 0}}", "training.loss.beta", "greater than 0"),
    ("training: {loss: {beta: .inf}}", "training.loss.beta", "finite"),
    ("training: {loss: {beta: nan}}", "training.loss.beta", "greater than 0|finite"),
    ("training: {loss: {beta: ten}}", "training.loss.beta", "number"),
    ("training: {loss: {type: sigmiod}}", "training.loss.type", "'sigmoid'"),
    ("training: {loss: {label_smoothing: 0.5}}", "training.loss.label_smoothing", "less than 0.5"),
    ("training: {schedule: {warmup_ratio: 1}}", "training.schedule.warmup_ratio", "less than 1"),
    ("training: {precision: float16}", "training.precision", "'float32' or 'bfloat16'"),
    ("training: {adapter: {rank: 0}}", "training.adapter.rank", "greater than or equal to 1"),
    ("training: {adapter: {dropout: 1}}", "training.adapter.dropout", "less than 1"),
    ("training: {adapter: {type: dora}}", "training.adapter.type", "'lora'"),
    (
        "training: {adapter: {target_modules: all}}",
        "training.adapter.target_modules.literal['all-linear']",
        "'all-linear'",
    ),
    ("training: {adapter: {target_modules: []}}", "training.adapter.target_modules.tuple[str, ...]", "at least 1"),
    ("training: {adapter: {export: gguf}}", "training.adapter.export", "'merged' or 'adapter'"),
    (
        "training: {start_from: champion}",
        "",
        "every promotion would start another run; set `automation.on_change: false`",
    ),
    (
        "{training: {start_from: champion, adapter: {export: adapter}}, automation: {on_change: false}}",
        "training",
        "the champion is another; use `adapter.export: merged`",
    ),
    ("data: {sources: []}", "data.sources", "at least 1"),
    ("data: {sources: [{}]}", "data.sources.0", "exactly one of `path`"),
    ("data: {sources: [{path: a, hub: b/c}]}", "data.sources.0", "exactly one of `path`"),
    ("data: {sources: [{hub: b/c}]}", "data.sources.0", "needs a `split`"),
    ("data: {sources: [{path: a, split: train}]}", "data.sources.0", "belong to `hub`"),
    ("data: {sources: [{path: a, format: csv}]}", "data.sources.0.format", "'auto'"),
    ("data: {sources: [{path: a}], validation_fraction: 1}", "data.validation_fraction", "less than 1"),
    ("tokenization: {max_length: 1}", "tokenization.max_length", "greater than or equal to 2"),
    ("tokenization: {over_length: cut}", "tokenization.over_length", "'truncate_prompt'"),
    ("release: {model_name: a/b}", "release.model_name", "pattern"),
    ("release: {}", "release.model_name", "required"),
    ("compute: {device: tpu}", "compute.device", "'cpu'"),
    ("evaluation: {samples: -1}", "evaluation.samples", "greater than or equal to 0"),
]


@pytest.mark.parametrize(("text", "field", "says"), MISTAKES, ids=[text for text, _, _ in MISTAKES])
def test_a_mistake_is_told_with_its_field_and_what_was_expected(text, field, says):
    with pytest.raises(ValidationError, match=says) as refused:
        recipe(text)
    assert field in {".".join(map(str, error["loc"])) for error in refused.value.errors()}


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Recipe.model_validate(SHORT).training.seed = 1


def test_paths_are_taken_from_the_recipes_folder(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "base").mkdir()
    text = "tokenization: {chat_template: chat.jinja}\nreference: {model: ../base}"
    located = recipe(text).located_at(tmp_path / "recipe")
    assert located.data.sources[0].path == str(tmp_path / "recipe" / "preferences.jsonl")
    assert located.reference.model == str(tmp_path / "base")
    assert located.tokenization.chat_template == str(tmp_path / "recipe" / "chat.jinja")
    assert located.tokenization.tokenizer is None


@pytest.mark.parametrize("model", ["org/name", "models:/other@champion"])
def test_a_hub_id_and_a_registry_address_stay_as_they_are(tmp_path, model):
    assert recipe(f"reference: {{model: '{model}'}}").located_at(tmp_path).reference.model == model


def test_an_absolute_path_stays(tmp_path):
    located = recipe(f"data: {{sources: [{{path: {tmp_path}/x.jsonl}}]}}").located_at(tmp_path / "recipe")
    assert located.data.sources[0].path == f"{tmp_path}/x.jsonl"


def test_the_schema_is_one_that_can_be_written_down():
    assert TypeAdapter(Recipe).json_schema()["additionalProperties"] is False
