"""Recipes: valid fields, defaults, and the errors for invalid fields."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from training.contract.config.key_settings import key_settings
from training.contract.config.loss import Loss
from training.contract.config.optimizer import AdamW
from training.contract.config.recipe import Recipe
from training.contract.config.variants import RecipeDocument
from training.contract.errors import RecipeError
from training.contract.protocol.settings import EvaluationRules, PreferencesSettings

SHORT: dict[str, Any] = {
    "data": {"sources": [{"path": "preferences.jsonl"}]},
    "reference": {"model": "../base"},
    "release": {"model_name": "demo"},
}


def recipe(text: str) -> Recipe:
    return Recipe.model_validate(SHORT | yaml.safe_load(text))


def test_short_recipe_gets_the_documented_defaults():
    resolved = Recipe.model_validate(SHORT)
    training, tokenization = resolved.training, resolved.tokenization
    off = dict.fromkeys(("ld_alpha", "weighting", "divergence"))
    assert training.loss.model_dump() == {"type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0} | off
    assert (training.batch_size, training.micro_tokens, training.optimizer.learning_rate) == (64, 16384, 5e-7)
    assert (tokenization.train_on, tokenization.max_length) == ("last_response", 1024)
    assert tokenization.over_length == "drop"
    assert (resolved.data.validation_fraction, resolved.data.max_quarantined) == (0.1, 0.05)
    assert Recipe.model_validate(resolved.model_dump(mode="json")) == resolved, "a resolved recipe resolves to itself"


def test_adapter_is_null_by_default_and_gets_its_own_defaults():
    """`null` is part of the keys of recipes from before adapters existed."""
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
def test_number_is_accepted_in_every_notation(text):
    """YAML 1.1 reads `5e-7`, without a point, as text."""
    assert recipe(f"training: {{optimizer: {{learning_rate: {text}}}}}").training.optimizer.learning_rate == 5e-7


@pytest.mark.parametrize("text", ["2026-11-05", "'2026-11-05'"])
def test_date_is_accepted_with_and_without_quotes(text):
    """YAML 1.1 parses a date without quotes."""
    tokenization = recipe(f"tokenization: {{date: {text}}}").tokenization
    assert tokenization.model_dump(mode="json")["date"] == "2026-11-05"


def test_schema_accepts_numbers_as_text():
    schema = Recipe.model_json_schema()["$defs"]["AdamW"]["properties"]["learning_rate"]
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
    ("training: {loss: {type: ipo, label_smoothing: 0.1}}", "training.loss", "belongs to sigmoid, robust, exo_pair"),
    ("training: {loss: {gamma: 1.0}}", "training.loss", "`gamma` .* sigmoid; .* simpo"),
    ("training: {loss: {type: hinge, of: [{type: ipo}]}}", "training.loss", "`of` .* belongs to mixture"),
    ("training: {loss: {type: exo_pair}}", "training.loss", "exo_pair .*`label_smoothing`.* 1e-3"),
    ("training: {loss: {type: sft}}", "training.loss", "preference loss .*`sft`.*`reference.sft`"),
    ("training: {loss: {type: mixture}}", "training.loss", "`of` is empty"),
    ("training: {loss: {type: mixture, of: [{type: ipo, beta: 1}]}}", "training.loss.of.0.beta", "not permitted"),
    ("training: {loss: {type: mixture, of: [{type: ipo, tau: 1}]}}", "training.loss.of.0", "belongs to discopop"),
    ("training: {loss: {type: mixture, of: [{type: mixture}]}}", "training.loss.of.0", "mixtures"),
    ("training: {loss: {type: mixture, of: [{type: ipo, weight: 0}]}}", "training.loss.of.0.weight", "greater than 0"),
    ("training: {loss: {type: mixture, of: [{type: ipo}, {type: ipo}]}}", "training.loss", "twice in the mixture"),
    ("training: {loss: {ld_alpha: 1.5}}", "training.loss.ld_alpha", "less than or equal to 1"),
    (
        "training: {loss: {type: dpo_norm, ld_alpha: 0.5}}",
        "training.loss",
        "`ld_alpha` .* cannot be used with dpo_norm",
    ),
    ("training: {loss: {type: aot, weighting: wpo}}", "training.loss", "`weighting` .* cannot be used with aot"),
    ("training: {loss: {type: apo_zero, divergence: {type: js}}}", "training.loss", "`divergence` .* apo_zero"),
    ("training: {loss: {divergence: {type: js, alpha: 0.5}}}", "training.loss.divergence", "the type is js"),
    ("training: {loss: {divergence: {type: alpha}}}", "training.loss.divergence", "`type: alpha` needs `alpha`"),
    ("tokenization: {template_kwargs: {tools: []}}", "tokenization", "`template_kwargs` has tools,"),
    ("tokenization: {date: yesterday}", "tokenization.date", "expected a date such as 2026-11-22, found yesterday"),
    ("tokenization: {date: 20261122}", "tokenization.date", "expected a date .*, found 20261122"),
    ("tokenization: {date: 2026-11-22 10:00:00}", "tokenization.date", "expected a date .*, found 2026-11-22 10:00"),
    ("training: {schedule: {warmup_ratio: 1}}", "training.schedule.warmup_ratio", "less than 1"),
    ("training: {precision: float16}", "training.precision", "'float32' or 'bfloat16'"),
    ("training: {optimizer: {type: sgd}}", "training.optimizer", "expected one of adamw, muon"),
    ("training: {optimizer: {learning_rate: 0}}", "training.optimizer.learning_rate", "greater than 0"),
    ("training: {optimizer: {momentum: 0.9}}", "training.optimizer", "`momentum` belongs to `type: muon`"),
    ("training: {optimizer: {type: muon, eps: 1}}", "training.optimizer", "`eps` is AdamW's: .* under `adamw:`"),
    ("training: {optimizer: {type: muon, momentum: 1}}", "training.optimizer.momentum", "less than 1"),
    ("training: {optimizer: {type: muon, ns_steps: 0}}", "training.optimizer.ns_steps", "greater than or equal"),
    ("training: {optimizer: {type: muon, adjust_lr: none}}", "training.optimizer.adjust_lr", "'original'"),
    (
        "training: {head_precision: float8, precision: bfloat16, loss: {type: aot}}",
        "training",
        "float8` .* type aot: .*`head_precision: exact`",
    ),
    (
        "training: {head_precision: float8, precision: bfloat16, loss: {type: mixture, of: [{type: hinge}, {type: aot}]}}",
        "training",
        "float8` .* type aot: .*`head_precision: exact`",
    ),
    ("training: {seed: 18446744073709551616}", "training.seed", "less than 18446744073709551616"),
    ("reference: {model: m, sft: {seed: -9223372036854775809}}", "reference.sft.seed", "greater than or equal to -92"),
    ("training: {head_precision: float8}", "training", "float8` needs `precision: bfloat16`, not float32"),
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
        "`training.start_from: champion` .*`automation.on_change: false`",
    ),
    (
        "{training: {start_from: champion, adapter: {export: adapter}}, automation: {on_change: false}}",
        "training",
        "`start_from: champion` .*`adapter.export: merged`",
    ),
    ("data: {sources: []}", "data.sources", "at least 1"),
    ("data: {sources: [{}]}", "data.sources.0", "exactly one of `path`"),
    ("data: {sources: [{path: a, hub: b/c}]}", "data.sources.0", "exactly one of `path`"),
    ("data: {sources: [{hub: b/c}]}", "data.sources.0", "needs a `split`"),
    ("data: {sources: [{path: a, split: train}]}", "data.sources.0", "belong to `hub`"),
    ("tokenization: {revision: main}", "tokenization", "belongs to `tokenizer`"),
    ("data: {sources: [{path: a, format: csv}]}", "data.sources.0.format", "'auto'"),
    ("data: {sources: [{path: a, columns: {promt: q}}]}", "data.sources.0.columns.promt.[key]", "'prompt', 'question'"),
    ("data: {sources: [{path: a, columns: {prompt: 1}}]}", "data.sources.0.columns.prompt", "string"),
    (
        "data: {sources: [{path: a, roles: {robot: bot}}]}",
        "data.sources.0.roles.robot",
        "'system', 'user', 'assistant'",
    ),
    ("data: {sources: [{path: a, roles: {yes: user}}]}", "data.sources.0.roles.1.[key]", "in quotes, found true"),
    ("data: {sources: [{path: a, roles: {a: no}}]}", "data.sources.0.roles.a", "'system', 'user', 'assistant'"),
    ("data: {sources: [{path: a, fraction: 0}]}", "data.sources.0.fraction", "greater than 0"),
    ("data: {sources: [{path: a, fraction: 10}]}", "data.sources.0.fraction", "less than or equal to 1"),
    ("data: {sources: [{path: a, name: a b}]}", "data.sources.0.name", "only letters, digits"),
    ("data: {sources: [{path: a, name: ..}]}", "data.sources.0.name", "only letters, digits"),
    (f"data: {{sources: [{{path: a, name: {'n' * 101}}}]}}", "data.sources.0.name", "at most 100 characters"),
    (
        "{data: {sources: [{path: a, name: c}, {path: b, name: a}]}, "
        "release: {model_name: m, gate: {min_accuracy_of: {e: 0, a: 1, d: 0}}}}",
        "",
        r"`release.gate.min_accuracy_of` has d, e, .*held-out pairs: a, c\)",
    ),
    ("release: {model_name: m, gate: {min_accuracy_of: {b: 0}}}", "", r"has b, .*held-out pairs: none\)"),
    (
        "{data: {sources: [{path: a, name: a}, {path: b, name: b, held_out: true}], validation_fraction: 0}, "
        "release: {model_name: m, gate: {min_accuracy_of: {a: 0, b: 1}}}}",
        "",
        r"has a, .*held-out pairs: b\)",
    ),
    (
        "release: {model_name: m, gate: {min_accuracy_of: {a: yes}}}",
        "release.gate.min_accuracy_of.a",
        "expected a number, found true",
    ),
    ("release: {model_name: m, gate: {min_accuracy: yes}}", "release.gate.min_accuracy", "a number, found true"),
    ("data: {sources: [{path: a, held_out: true}]}", "data", "all of `sources` are `held_out`"),
    ("data: {sources: [{path: a}], validation_fraction: 1}", "data.validation_fraction", "less than 1"),
    ("tokenization: {max_length: 1}", "tokenization.max_length", "greater than or equal to 2"),
    ("tokenization: {over_length: cut}", "tokenization.over_length", "'truncate_prompt'"),
    ("release: {model_name: a/b}", "release.model_name", "only letters, digits"),
    ("release: {model_name: ..}", "release.model_name", "only letters, digits"),
    ("release: {}", "release.model_name", "required"),
    ("compute: {device: tpu}", "compute.device", "'cpu'"),
    ("compute: {parallel: tensor}", "compute.parallel", "'fsdp'"),
    ("compute: {keep_checkpoints: 0}", "compute.keep_checkpoints", "greater than or equal to 1"),
    ("evaluation: {samples: -1}", "evaluation.samples", "greater than or equal to 0"),
    ("training: {batch_size: yes}", "training.batch_size", "expected a number, found true"),
    ("training: {optimizer: {learning_rate: on}}", "training.optimizer.learning_rate", "found true"),
    ("training: {optimizer: {betas: [no, 0.99]}}", "training.optimizer.betas.0", "expected a number, found false"),
    ("training: {optimizer: {betas: [.nan, 0.99]}}", "training.optimizer.betas.0", "greater than or equal to 0"),
    ("compute: {nodes: true}", "compute.nodes", "found true"),
    ("training: {max_steps: on}", "training.max_steps", "expected a number, found true"),
    ("release: {model_name: on}", "release.model_name", "expected text, in quotes, found true"),
    ("training: {optimizer: muon}", "training.optimizer", "expected a section, for example .*found 'muon'"),
    ("training: {batch_size: 2147483648}", "training.batch_size", "less than or equal to 2147483647"),
    ("evaluation: {max_new_tokens: 1048577}", "evaluation.max_new_tokens", "less than or equal to 1048576"),
]


@pytest.mark.parametrize(("text", "field", "message"), MISTAKES, ids=[text for text, _, _ in MISTAKES])
def test_invalid_recipe_raises_with_field_and_expected_value(text, field, message):
    with pytest.raises(ValidationError, match=message) as raised:
        recipe(text)
    assert field in {".".join(map(str, error["loc"])) for error in raised.value.errors()}


LOSSES: dict[str, dict[str, Any]] = {
    "{beta: 0.3}": {"type": "sigmoid", "beta": 0.3, "label_smoothing": 0.0},
    "{type: hinge}": {"type": "hinge", "beta": 0.1},
    "{type: simpo, beta: 2, gamma: 1e-1}": {"type": "simpo", "beta": 2.0, "gamma": 0.1},
    "{type: exo_pair, label_smoothing: 1e-3}": {"type": "exo_pair", "beta": 0.1, "label_smoothing": 0.001},
    "{type: mixture, of: [{type: discopop}, {type: sft, weight: 5e-1}], ld_alpha: 0.5}": {
        "type": "mixture",
        "beta": 0.1,
        "of": [{"type": "discopop", "tau": 0.05, "weight": 1.0}, {"type": "sft", "weight": 0.5}],
        "ld_alpha": 0.5,
    },
    "{divergence: {type: js}}": {
        "type": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "divergence": {"type": "js"},
    },
}


@pytest.mark.parametrize("text", LOSSES)
def test_loss_settings_hold_only_fields_of_the_type_and_active_options(text):
    """So older recipes keep their fingerprints when types or options are added."""
    loss = recipe(f"training: {{loss: {text}}}").training.loss
    assert key_settings(loss) == LOSSES[text]
    assert key_settings(Loss.model_validate(key_settings(loss))) == LOSSES[text]
    assert Loss.model_validate(loss.model_dump(mode="json")) == loss


NEEDS = [
    ("{}", "reference"),
    ("{ld_alpha: 0.5}", "reference tokens"),
    ("{type: simpo}", ""),
    ("{type: cpo}", ""),
    ("{type: mixture, of: [{type: orpo}, {type: sft}]}", "batch"),
    ("{type: aot}", "reference pairs batch"),
    ("{type: mixture, of: [{type: bco_pair}, {type: simpo}]}", "reference pairs state batch"),
]


@pytest.mark.parametrize(("text", "needs"), NEEDS)
def test_loss_has_the_needs_of_its_types(text, needs):
    loss = recipe(f"training: {{loss: {text}}}").training.loss
    traits = {
        "reference": loss.needs_reference,
        "tokens": loss.needs_token_logprobs,
        "pairs": loss.couples_pairs,
        "state": loss.keeps_state,
        "batch": loss.depends_on_batch,
    }
    assert [name for name, is_needed in traits.items() if is_needed] == needs.split()


def test_optimizer_without_type_is_adamw():
    """Older recipes lack `type`."""
    fields = {"learning_rate": 1e-5, "weight_decay": 0.1}
    optimizer = recipe(f"training: {{optimizer: {fields}}}").training.optimizer
    assert optimizer == AdamW(**fields)
    assert list(optimizer.model_dump()) == ["type", "learning_rate", "betas", "eps", "weight_decay"]


def test_muon_gets_the_documented_defaults():
    resolved = recipe("training: {optimizer: {type: muon, learning_rate: 1e-4, adamw: {eps: 1e-6}}}")
    assert resolved.training.optimizer.model_dump(mode="json") == {
        "type": "muon",
        "learning_rate": 1e-4,
        "weight_decay": 0.0,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr": "match_rms_adamw",
        "adamw": {"type": "adamw", "learning_rate": 5e-7, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0},
    }
    assert Recipe.model_validate(resolved.model_dump(mode="json")) == resolved


def test_settings_of_sources_without_roles_hold_two_lists():
    """They are part of the key of the pairs, so older data must keep them."""
    of_data = {"validation_fraction": 0.1, "duplicates": "keep"}
    expected = {"formats": ["auto", "auto"], "held_out": [False, False], **of_data}
    plain, mapped = (
        PreferencesSettings.of(recipe(f"data: {{sources: [{{path: a}}, {{path: b{roles}}}]}}"))
        for roles in ("", ", roles: {developer: system}")
    )
    assert key_settings(plain) == expected
    assert key_settings(mapped) == {**expected, "roles": [{}, {"developer": "system"}]}
    assert [source.roles for source in mapped.by_source] == [{}, {"developer": "system"}]
    assert [source.roles for source in plain.by_source] == [{}, {}]


def test_recipe_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Recipe.model_validate(SHORT).training.seed = 1  # type: ignore[misc]  # mypy reports it too


def test_located_at_resolves_relative_paths_from_the_recipes_folder(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "base").mkdir()
    text = "tokenization: {chat_template: chat.jinja}\nreference: {model: ../base}"
    located = recipe(text).located_at(tmp_path / "recipe")
    assert located.data.sources[0].path == str(tmp_path / "recipe" / "preferences.jsonl")
    assert located.reference.model == str(tmp_path / "base")
    assert located.tokenization.chat_template == str(tmp_path / "recipe" / "chat.jinja")
    assert located.tokenization.tokenizer is None


def test_located_at_expands_the_users_folder(tmp_path: Path):
    text = "data: {sources: [{path: ~/pairs.jsonl}]}\ntokenization: {chat_template: ~/chat.jinja}\nreference: {model: ~/base}"
    located = recipe(text).located_at(tmp_path)
    assert located.data.sources[0].path == str(Path.home() / "pairs.jsonl")
    assert located.tokenization.chat_template == str(Path.home() / "chat.jinja")
    assert located.reference.model == str((Path.home() / "base").resolve())


@pytest.mark.parametrize("model", ["org/name", "models:/other@champion"])
def test_located_at_keeps_hub_ids_and_registry_addresses(tmp_path, model):
    assert recipe(f"reference: {{model: '{model}'}}").located_at(tmp_path).reference.model == model


@pytest.mark.parametrize(
    "text", ["reference: {model: org/m, revision: v1}", "tokenization: {tokenizer: org/m, revision: v1}"]
)
def test_located_at_of_folder_with_revision_raises(tmp_path, text):
    assert recipe(text).located_at(tmp_path) is not None
    (tmp_path / "org" / "m").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"`org/m` .*`revision: v1` .*`\./org/m`.*\[ambiguous-model\]"):
        recipe(text).located_at(tmp_path)
    assert recipe(text.replace("org/m", "./org/m")).located_at(tmp_path) is not None


def test_located_at_keeps_absolute_paths(tmp_path):
    located = recipe(f"data: {{sources: [{{path: {tmp_path}/x.jsonl}}]}}").located_at(tmp_path / "recipe")
    assert located.data.sources[0].path == f"{tmp_path}/x.jsonl"


def test_json_schema_forbids_unknown_fields():
    assert TypeAdapter(Recipe).json_schema()["additionalProperties"] is False


def sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every section of a recipe's JSON schema by its name."""
    yield "Recipe", schema
    yield from schema["$defs"].items()


def test_every_field_has_a_description_in_the_json_schema() -> None:
    """Editors and Dagster show them."""
    schema = RecipeDocument.model_json_schema()
    missing = [
        f"{section}.{name}"
        for section, properties in sections(schema)
        for name, field in properties.get("properties", {}).items()
        if not str(field.get("description", "")).endswith(".")
    ]
    assert missing == []


def test_only_disclosure_by_votes_is_in_the_key_of_an_evaluation() -> None:
    plain, exact, votes = (
        key_settings(EvaluationRules.of(recipe(text)))
        for text in ("{}", "evaluation: {disclosure: exact, disclosure_budget: 0.5}", "evaluation: {disclosure: votes}")
    )
    assert exact == plain and votes == {**plain, "disclosure": "votes"}


def test_disclosure_budget_above_one_is_refused() -> None:
    with pytest.raises(ValidationError, match="disclosure_budget"):
        recipe("evaluation: {disclosure_budget: 1.5}")


def test_resolved_recipe_with_the_gate_ladder_resolves_to_itself() -> None:
    resolved = recipe("release: {model_name: demo, gate: {type: ladder}}")
    assert Recipe.model_validate(resolved.model_dump(mode="json")) == resolved
    with pytest.raises(ValidationError, match="has no `alpha`"):
        recipe("release: {model_name: demo, gate: {type: ladder, alpha: 0.2}}")
