"""A recipe's folder as a pipeline: its declarations, and two recipes in one graph."""

import datetime
import errno
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster.components.component_scaffolding import scaffold_object
from setuptools import find_packages  # type: ignore[import-untyped]

from assets.pipeline.graph import GRAPH
from tests.workflows.homes import ATTRIBUTES, ROOT, write_recipe
from training.contract.config.key_settings import key_settings
from training.contract.config.recipe import Recipe
from training.contract.errors import RecipeError, UsageError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.identity.software import SOFTWARE
from workflows.definitions import definitions_in
from workflows.orchestration.resources import services
from workflows.recipes.component import DEFS
from workflows.recipes.discovery import load_recipe, load_recipes
from workflows.recipes.scaffold import init_recipe

# By hand from docs/concepts/assets-and-lineage.md: asset -> (stage, direct dependencies, in the GPU pool).
EXPECTED = {
    "preference_source": ("sources", set(), False),
    "base_model": ("sources", set(), False),
    "tokenization_spec": ("specs", set(), False),
    "training_spec": ("specs", set(), False),
    "evaluation_spec": ("specs", set(), False),
    "release_spec": ("specs", set(), False),
    "raw_preferences": ("data", {"preference_source"}, False),
    "tokenized_pairs": ("data", {"raw_preferences", "tokenization_spec"}, False),
    "reference_model": ("reference", {"base_model", "tokenized_pairs"}, True),
    "reference_logprobs": ("reference", {"tokenized_pairs", "reference_model"}, True),
    "prequential_scores": ("evaluation", {"raw_preferences", "tokenized_pairs", "reference_logprobs"}, True),
    "policy": (
        "training",
        {"tokenized_pairs", "reference_logprobs", "reference_model", "training_spec", "prequential_scores"},
        True,
    ),
    "evaluation": (
        "evaluation",
        {"policy", "reference_logprobs", "reference_model", "tokenized_pairs", "evaluation_spec"},
        True,
    ),
    "released_model": (
        "release",
        {"policy", "evaluation", "tokenization_spec", "release_spec", "prequential_scores"},
        False,
    ),
}


def graph_of(*folders):
    """Return the asset graph of recipes side by side, as `workflows.definitions` builds it."""
    loaded = [load_recipe(folder).definitions for folder in folders]
    return dg.Definitions.merge(*loaded, dg.Definitions(resources={"services": services})).resolve_asset_graph()


@pytest.fixture(scope="module")
def demo():
    return graph_of(DEFS / "demo")


def test_reading_one_of_many_variants_builds_no_assets(tmp_path, monkeypatch):
    """Thirteen assets of a hundred variants cost Dagster seconds; an invalid schedule is reported without them."""
    folder = write_recipe(tmp_path / "many", {**ATTRIBUTES, "variants": {"a": {"training": {"seed": 1}}}})
    made = []

    def declare(pipeline, freshness):
        made.append(pipeline.name)
        return []

    monkeypatch.setattr("workflows.recipes.discovery.build_assets", declare)
    loaded = load_recipe(folder, "a")
    assert made == []
    assert (len(list(loaded.definitions.jobs)), made) == (3, ["many-a"])


PIPELINES = """
from workflows.definitions import defs
print(sorted({key.path[0] for key in defs().resolve_asset_graph().get_all_asset_keys()}))
"""


def test_installed_package_shows_listed_recipes(tmp_path: Path):
    """Copy the files of a build: the packages in pyproject.toml, without recipes and without a Dagster project."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    site = tmp_path / "site"
    for root in (ROOT / folder for folder in build["where"]):
        for package in find_packages(str(root), include=build["include"]):
            part = package.replace(".", "/")
            (site / part).mkdir(parents=True)
            for module in (root / part).glob("*.py"):
                shutil.copy(module, site / part)
    for name in ("one", "two"):
        write_recipe(tmp_path / "recipes" / name, ATTRIBUTES)
    variables = {"PYTHONPATH": str(site), "PEDIGREE_RECIPES": str(tmp_path / "recipes")}
    done = subprocess.run(
        [sys.executable, "-c", PIPELINES],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "['one', 'two']"


def test_the_graph_of_the_demo(demo):
    found = {
        key.path[1]: (
            demo.get(key).tags["pedigree/stage"],
            {parent.path[1] for parent in demo.get(key).parent_keys},
            demo.get(key).pools == {"gpu"},
        )
        for key in demo.get_all_asset_keys()
    }
    assert found == EXPECTED
    assert list(GRAPH) == list(EXPECTED)


def test_every_asset_is_described(demo):
    for key in demo.get_all_asset_keys():
        node = demo.get(key)
        assert node.description and node.owners and node.kinds and node.code_version


def test_without_supervised_tuning_the_reference_needs_no_pairs(tmp_path):
    graph = graph_of(write_recipe(tmp_path / "plain", ATTRIBUTES))
    parents = graph.get(dg.AssetKey(["plain", "reference_model"])).parent_keys
    assert parents == {dg.AssetKey(["plain", "base_model"])}


def test_paths_are_taken_from_the_file(tmp_path):
    (tmp_path / "shared-model").mkdir()
    attributes = {**ATTRIBUTES, "reference": {"model": "../shared-model"}}
    recipe = load_recipe(write_recipe(tmp_path / "here", attributes)).pipeline.recipe
    assert recipe.data.sources[0].path == str(tmp_path / "here" / "preferences.jsonl")
    assert recipe.reference.model == str(tmp_path / "shared-model")


def test_scientific_notation_is_a_number(tmp_path):
    folder = write_recipe(tmp_path / "small", ATTRIBUTES)
    text = (folder / "defs.yaml").read_text().replace("learning_rate: 0.001", "learning_rate: 5e-7")
    assert "5e-7" in text
    (folder / "defs.yaml").write_text(text)
    assert load_recipe(folder).pipeline.recipe.training.optimizer.learning_rate == 5e-7


# Keys of a minimal recipe. With another key the asset is recomputed.
CODE_VERSIONS = {
    "preference_source": "2-10e93c011412",
    "base_model": "1-10e93c011412",
    "tokenization_spec": "1-ae782c9ff1ed",
    "training_spec": "1-b343bf3cd062",
    "evaluation_spec": "1-7d6b65356284",
    "release_spec": "1-844703f1d875",
    "raw_preferences": "9-eb4c85cd1786",
    "tokenized_pairs": "2-10e93c011412",
    "reference_model": "1-10e93c011412",
    "reference_logprobs": "1-889cc2145936",
    "prequential_scores": "1-4f17c7103a43",
    "policy": "1-10e93c011412",
    "evaluation": "5-10e93c011412",
    "released_model": "1-afa24be79c31",
}


def test_keys_of_a_minimal_recipe_are_unchanged():
    """Keys are the same as when stores were filled: a new field leaves the key alone at its default, or comes with a version.

    Versions of assets that changed their keys:
    `preference_source` 2: the extension that selects the reader counts.
    `raw_preferences` 4: rows may hold arguments for the template. 5: transcripts may begin in `prompt`, and `history` counts
    beside plain text. 6: pairs that repeat another are counted. 7: CSV has line numbers, and a source needs a row.
    9: more formats.
    `tokenized_pairs` 2: a pair is dropped if the template leaves out a message.
    `evaluation` 5: samples end at the released model's end tokens.
    `disable_dropout` counts at its default too: before it, policies were trained with the dropout of their config.

    Versions of libraries are not part of these keys: results of other versions are compared and reused.
    """
    recipe = Recipe.model_validate(yaml.safe_load(f"{{{MINIMAL}}}"))
    of_any_software = {}
    for asset, node in GRAPH.items():
        settings = {name: value for name, value in key_settings(node.reads(recipe)).items() if name != SOFTWARE}
        of_any_software[asset] = f"{node.version}-{short(fingerprint('settings', settings))}"
    assert of_any_software == CODE_VERSIONS
    assert {asset for asset in GRAPH if SOFTWARE in key_settings(GRAPH[asset].reads(recipe))} == {
        "tokenization_spec",
        "tokenized_pairs",
        "reference_logprobs",
    }
    rounded = recipe.training.model_copy(update={"precision": "bfloat16"})
    recipe = recipe.model_copy(update={"training": rounded})
    faster = rounded.model_copy(update={"head_precision": "float8"})
    balanced = rounded.model_copy(update={"router_aux_loss_coef": 0.01})
    dated = recipe.tokenization.model_copy(update={"date": datetime.date(2026, 11, 22)})
    for section, changed in (("training", faster), ("training", balanced), ("tokenization", dated)):
        other, asset = recipe.model_copy(update={section: changed}), f"{section}_spec"
        assert GRAPH[asset].code_version(other) != GRAPH[asset].code_version(recipe), "any other value counts"


def test_key_of_a_tuned_model_is_unchanged():
    """With the fields of `sft` at their defaults, older stores have this key."""
    found = []
    for written in ("{}", "{router_aux_loss_coef: 0}", "{router_aux_loss_coef: 0.01}"):
        text = MINIMAL.replace("model: ./b", f"model: ./b, sft: {written}")
        found.append(GRAPH["reference_model"].code_version(Recipe.model_validate(yaml.safe_load(f"{{{text}}}"))))
    assert found[:2] == ["1-abc63bacde0d"] * 2 and found[2] != found[0]


MINIMAL = "data: {sources: [{path: a.jsonl}]}, reference: {model: ./b}, release: {model_name: x}"


SOURCE_ONLY = "reference: {model: b}, release: {model_name: x}"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("{%s, training: {batchsize: 3}}", r"3: training.batchsize: .*`batch_size`\? \[unknown-field\]"),
        (
            "{%s, training: {optimizer: {momentun: 0.5}}}",
            r"training.optimizer.momentun: .*`momentum`.*\[unknown-field\]",
        ),
        ("{%s, evaluation: {zzz: 3}}", r"evaluation.zzz: .* samples, max_new_tokens.*\[unknown-field\]"),
        ("{%s, training: {batch_size: -4}}", r"3: training.batch_size: .* 1, .* -4 \[invalid-value\]"),
        (
            "{data: {sources: [{hub: a/b}]}, reference: {model: b}, release: {}}",
            r"3: release.model_name: .*\[missing-field\]",
        ),
        ("{%s, evaluation: {samples: 1},\n  evaluation: {samples: 2}}", r"`evaluation` .*3 and 4.*\[duplicate-field\]"),
        ("{%s, automation: {cron: every day}}", r"3: automation.cron: every day: .*\[wrong-schedule\]"),
        ("{%s, automation: {cron: '0 6 31 2,4 *'}}", r"3: automation.cron: 0 6 31 2,4 \*: .*\[wrong-schedule\]"),
        (
            "{%s, automation: {cron: '0 6 * * 1', timezone: Europe}}",
            r"3: automation.timezone: Europe: .*\[unknown-time-zone\]",
        ),
        (
            "{%s, automation: {cron: '0 6 * * 1', timezone: ../x}}",
            r"3: automation.timezone: ../x: .*\[unknown-time-zone\]",
        ),
        (
            "{%s, automation: {cron: '0 6 * * 1', timezone: Mars}}",
            r"3: automation.timezone: Mars: .*\[unknown-time-zone\]",
        ),
        (
            "{%s, training: {loss: {type: sigmiod}}}",
            r"loss.type: expected 'sigmoid', .* 'sigmiod'; .*`sigmoid`.*\[unknown-choice\]",
        ),
        ("{%s, training: {loss: {type: dpo}}}", r" 'dpo'; .*`sigmoid`.*\[unknown-choice\]"),
        ("{%s, training: {loss: {type: sigmoid_norm}}}", r" 'sigmoid_norm'; .*`dpo_norm`.*\[unknown-choice\]"),
        ("{%s, training: {loss: {type: kto_pair}}}", r" 'kto_pair' \[unknown-choice\]$"),
        ("{%s, training: {precision: bf16}}", r" 'bf16'; .*`bfloat16`.*\[unknown-choice\]"),
        ("{%s, training: {warmup_steps: 10}}", r"`training.schedule.warmup_ratio`.*\[unknown-field\]"),
        ("{%s, training: {loss: {rpo_alpha: 1.0}}}", r"rpo_alpha: .*`training.loss.of`.*\[unknown-field\]"),
        ("{%s, tokenization: {max_prompt_length: 9}}", r"`tokenization.max_length`.*\[unknown-field\]"),
        ("{%s, training: {adapter: {r: 8}}}", r"`training.adapter.rank`.*\[unknown-field\]"),
        (
            "{%s, compute: {device: gpu}}",
            r"compute.device: expected 'auto', 'cpu' or 'cuda', .* 'gpu' \[unknown-choice\]$",
        ),
        ("{%s, training: {seed: null}}", r"3: training.seed: .* null \[wrong-type\]$"),
        ("{%s, training: {max_steps: 1:30}}", r":3: .* 1:30 .*90 .*\[ambiguous-number\]"),
        ("{%s, tokenization: {date: 2026-13-45}}", r":3: tokenization.date: .* 2026-13-45 \[invalid-value\]$"),
        ("{%s, tokenization: {date: !!timestamp soon}}", r":3: .*`soon` .*timestamp.*\[wrong-yaml-tag\]$"),
        ("{%s, training: {max_steps: !!int many}}", r":3: .*`many` .*int.*\[wrong-yaml-tag\]$"),
        ("{%s, training: {max_steps: !steps 3}}", r":3: .*`3` .*!steps.*\[wrong-yaml-tag\]$"),
        ("{%s, training: !python/object:os.x {}}", r":3: .*this section .*python/object:os.x.*\[wrong-yaml-tag\]$"),
        ("{%s, training: {max_steps: 012}}", r":3: .* 012 .*10 .*\[ambiguous-number\]"),
        ("{%s, training: {optimizer: {weight_decay: 1:30.5}}}", r":3: .* 1:30.5 .*90.5 .*\[ambiguous-number\]"),
        ("{%s, variants: {hot: {training: {seed: -07}}}}", r":3: .* -07 .*-7 .*'-07'.*\[ambiguous-number\]"),
        ("{%s, training: {loss: hinge}}", r"training.loss: .*\(type, .*\), .*'hinge' \[wrong-type\]"),
        ("{%s, training: {beta: 1}}", r"training.beta: .*`training.loss.beta`.*\[unknown-field\]"),
        (
            "{%s, reference: {sft: {learning_rate: 1}, model: b}}",
            r"`reference.sft.optimizer.learning_rate`.*\[unknown-field\]",
        ),
        (
            "{%s, training: {adapter: {target_modules: []}}}",
            r"target_modules: expected 'all-linear', .*, or expected at least 1.*\[invalid-value\]",
        ),
        ("{data: {sources: a.jsonl}, " + SOURCE_ONLY + "}", r"sources: .* list, .*'a.*\[wrong-type\]"),
        (
            "{data: {sources: [{path: a, name: '1'}]}, "
            "reference: {model: b}, release: {model_name: x, gate: {min_accuracy_of: {1: 0.5}}}}",
            r"3: release.gate.min_accuracy_of.1: .* 1 \[wrong-type\]$",
        ),
        ("{%s, evaluation: {samples: " + "x" * 99 + "}}", r"evaluation.samples: .* 'x{79} \.\.\. \[wrong-type\]$"),
        ("{%s, training: {loss: {loss: hinge}}}", r"training.loss.loss: (?!.*`training.loss`)"),
        (
            "{data: {sources: [{pathh: a}]}, " + SOURCE_ONLY + "}",
            r"3: data.sources.0.pathh: .*`path`\? \[unknown-field\]$",
        ),
        ("{%s, variants: {one: hinge}}", r"variants.one: .*\(data, tok.*, .*'hinge' \[wrong-type\]"),
        ("{data: {sources: [{path: ''}]}, " + SOURCE_ONLY + "}", r"3: data.sources.0.path: .* ''.*\[invalid-value\]$"),
        (
            "{data: {sources: [{path: a, columns: {chosen: yes}}]}, " + SOURCE_ONLY + "}",
            r"3: data.sources.0.columns.chosen: .* true .*yes, no, on and off",
        ),
        ("{%s, training: {adapter: yes}}", r"3: training.adapter: .*\(type, rank, .*\), .* true .*yes, no, on and off"),
        (
            "{%s, compute: {parallel: no}}",
            r"3: compute.parallel: expected 'auto', .* or 'hsdp', .* false .*\[unknown-choice\]",
        ),
        ("{%s, training: {optimizer: {betas: on}}}", r"3: training.optimizer.betas: .* list, .* true .*\[wrong-type\]"),
        ("{%s, training: {optimizer: on}}", r"3: training.optimizer: .* section, .* true "),
        (
            "{%s, tokenization: {template_kwargs: 1}}",
            r"3: tokenization.template_kwargs: .* section, .* 1 \[wrong-type\]$",
        ),
        ("{%s, compute: {precision: float32}}", r"3: compute.precision: .*`training.precision`\? \[unknown-field\]$"),
        ("{%s, variants: {'a b': {}}}", r"variants.a b: .*`-` and `_`, .*'a b' \[invalid-value\]$"),
        (
            "{data: {sources: [{path: a}]}, reference: {model: b}, release: {model_name: x/y}}",
            r"3: release.model_name: .*`-`, `_` and `.`.*'x/y' \[invalid-value\]$",
        ),
        ("{%s, automation: {timezone: ' '}}", r"3: automation.timezone: .* ' '.*\[invalid-value\]"),
        ("{%s}\n\tx: 1", r":4: .*YAML.* spaces.*\[not-yaml\]"),
        ("", r"`attributes` .*\[missing-field\]"),
    ],
)
def test_problem_of_a_recipe_is_reported_with_file_and_line(tmp_path, attributes, message):
    folder = tmp_path / "wrong"
    folder.mkdir()
    text = attributes.replace("%s", MINIMAL)
    (folder / "defs.yaml").write_text(f"type: workflows.PreferenceTuning\nattributes:\n  {text}\n")
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe(folder)
    lines = str(error.value).splitlines()
    assert all(line.startswith(str(folder / "defs.yaml")) and line.count("defs.yaml") == 1 for line in lines)
    assert not any("at least 1 item" in line and "(" in line.partition("at least 1 item")[2] for line in lines), (
        "pydantic's count of the valid sources"
    )


# Lines are counted by hand; %s is the case's addition to the training.
CONTRADICTIONS = """\
type: workflows.PreferenceTuning
attributes:
  data:
    sources:
      - path: a.jsonl
        held_out: %(held_out)s
      - path: b.jsonl
        name: b
  reference: {model: %(model)s}
  training:
    epochs: 2
    %(training)s
    loss: {type: sigmoid}
  release:
    model_name: x
    gate:
      min_accuracy_of: {%(floor)s: 0.5}
  variants:
    hot:
      training:
        seed: 2
        %(hot)s
"""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"training": "start_from: champion"}, "12: training.start_from: `training.start_from: champion` "),
        ({"training": "head_precision: float8"}, "12: training.head_precision: `head_precision: float8` "),
        ({"model": "models:/x@champion"}, "9: reference.model: `reference.model: models:/x@champion` "),
        ({"floor": "c"}, "17: release.gate.min_accuracy_of: `release.gate.min_accuracy_of` .* c, "),
        ({"held_out": "true\n        split: x"}, "7: data.sources.0.split: `config`, `split` and `revision` "),
        ({"hot": "head_precision: float8"}, "22: variants.hot.training.head_precision: `head_precision: float8` "),
        (
            {"hot": "adapter: {export: adapter}\n        start_from: champion"},
            "23: variants.hot.training.start_from: `start_from: champion` .*`adapter.export: adapter`",
        ),
    ],
)
def test_contradicting_fields_are_reported_with_the_line_of_one(tmp_path, case, message):
    folder = tmp_path / "wrong"
    folder.mkdir()
    valid = {"held_out": "true", "model": "./b", "training": "seed: 1", "floor": "b", "hot": "batch_size: 3"}
    (folder / "defs.yaml").write_text(CONTRADICTIONS % (valid | case))
    with pytest.raises(RecipeError, match=rf"{message}.*\[invalid-value\]"):
        load_recipes(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r" .*`type: workflows.PreferenceTuning`.*\[not-one-recipe\]"),
        (b"attributes: {}\n", r" .*`type`.*\[not-one-recipe\]"),
        (b"type: workflows.Nothing\nattributes: {}\n", r" .*workflows.Nothing.*\[not-one-recipe\]"),
        (
            b"type: workflows.PreferenceTuning\n---\ntype: workflows.PreferenceTuning\n",
            r" .*one document.* 2 .*\[not-one-recipe\]",
        ),
        (b"type: [oops\n  a: b", r"2: .*\[not-yaml\]"),
        ("ä: ö\nb: \0".encode(), r"2: .*U\+0000.*\[not-yaml\]$"),
        (b"type: workflows.PreferenceTuning\n# caf\xe9\n", r"2: byte 0xe9 .*UTF-8.*\[not-utf-8\]"),
    ],
)
def test_file_without_a_recipe_is_named(tmp_path, content, message):
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "defs.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=r"wrong/defs\.yaml:" + message):
        load_recipe(folder)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    """Another user's file, in a shared folder of recipes. The error is simulated, because root may read every file."""
    folder = write_recipe(tmp_path / "theirs", ATTRIBUTES)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RecipeError, match=r"theirs/defs\.yaml: .*Permission denied.*\[unreadable-file\]"):
        load_recipe(folder)


@pytest.mark.parametrize("link", [False, True])
def test_web_servers_report_an_invalid_recipe_with_the_same_message(tmp_path, link):
    """Dagster itself reads the folder `defs` of the project, and must not add a message of its own."""
    write_recipe(tmp_path / "defs" / "right", ATTRIBUTES)
    wrong = write_recipe(tmp_path / "group" / "wrong", {**ATTRIBUTES, "training": {"epoch": 3}})
    (tmp_path / "defs" / "group").symlink_to(wrong.parent) if link else wrong.parent.rename(tmp_path / "defs" / "group")
    another = tmp_path / "defs" / "another" / "defs.yaml"
    another.parent.mkdir()
    another.write_text("type: dagster.DefinitionsComponent\nattributes: {path: code.py}\n")
    with pytest.raises(
        RecipeError, match=r"group/wrong/defs.yaml:\d+: training.epoch: .*`epochs`.*\[unknown-field\]"
    ) as error:
        definitions_in(tmp_path)
    assert error.value.__cause__ is None and error.value.__suppress_context__


@pytest.mark.parametrize(
    "name", ["pedigree.PreferenceTuning", "workflow.PreferenceTuning", "__main__.X", "dagster.Nothing"]
)
def test_web_servers_report_an_unknown_type(tmp_path, name):
    file = write_recipe(tmp_path / "defs" / "wrong", ATTRIBUTES) / "defs.yaml"
    file.write_text(file.read_text().replace("workflows.PreferenceTuning", name))
    with pytest.raises(RecipeError, match=rf"wrong/defs.yaml: .*{name}.*\[not-one-recipe\]"):
        definitions_in(tmp_path)


RENDERED = (
    "post_processing: {assets: [{attributes: {group_name: \"{{ cycler.__init__.__globals__.os.system('id') }}\"}}]}"
)


@pytest.mark.parametrize(
    ("beside", "what"),
    [
        (RENDERED, "`post_processing`"),
        ("template_vars_module: .code", "`template_vars_module`"),
        ("---\ntype: dagster.DefinitionsComponent\nattributes: {path: code.py}", "another document"),
    ],
)
def test_files_beside_a_recipe_are_not_executed(tmp_path, beside, what):
    """Dagster renders such Jinja outside of a sandbox, and imports such modules, before any run is requested."""
    folder = write_recipe(tmp_path / "defs" / "other", ATTRIBUTES)
    with open(folder / "defs.yaml", "a") as file:
        line = 1 + len((folder / "defs.yaml").read_text().splitlines()) + beside.startswith("---")
        file.write(f"{beside}\n")
    for load in (lambda: load_recipe(folder), lambda: definitions_in(tmp_path)):
        with pytest.raises(RecipeError, match=rf"defs\.yaml:{line}: {what}.*\[foreign-content\]"):
            load()


def test_two_recipes_side_by_side(tmp_path):
    """Dagster allows hyphens in asset keys, but not in the names of jobs, schedules and sensors."""
    graph = graph_of(*(write_recipe(tmp_path / name, ATTRIBUTES) for name in ("one", "my-model")))
    assert {key.path[0] for key in graph.get_all_asset_keys()} == {"one", "my-model"}
    assert len(graph.get_all_asset_keys()) == 2 * len(EXPECTED)


def test_every_shipped_recipe_loads():
    for file in DEFS.glob("*/defs.yaml"):
        load_recipe(file.parent)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["check", "defs"], ["list", "defs"]])
def test_dg_finds_the_definitions(command):
    """Its `check yaml` is a part of `check defs`."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dg")), *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if command == ["list", "defs"]:
        for name in ("demo/released_model", "demo_schedule", "demo_data_sensor"):
            assert name in done.stdout


def test_what_dg_scaffolds_is_a_recipe_to_fill_in(tmp_path):
    """`dg scaffold defs workflows.PreferenceTuning my-model` ends in this call of Dagster's."""
    folder = tmp_path / "my-model"
    scaffold_object(folder, "workflows.PreferenceTuning", None, "yaml", None)
    recipe = load_recipe(folder).pipeline.recipe
    assert (recipe.release.model_name, recipe.reference.model) == ("my-model", str(folder / "base"))
    with pytest.raises(UsageError, match=r"--format.*\[unsupported-scaffold\]"):
        scaffold_object(folder, "workflows.PreferenceTuning", None, "python", None)


def test_init_writes_the_same_recipe_anywhere_and_over_no_other_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scaffold_object(tmp_path / "my-model", "workflows.PreferenceTuning", None, "yaml", None)
    file = init_recipe(Path("far/my-model"))
    assert file == tmp_path / "far" / "my-model" / "defs.yaml"
    assert file.read_text() == (tmp_path / "my-model" / "defs.yaml").read_text()
    file.write_text("mine")
    with pytest.raises(UsageError, match=r"far/my-model/defs\.yaml .*\[file-exists\]"):
        init_recipe(Path("far/my-model"))
    with pytest.raises(UsageError, match=r"defs\.yaml/x/defs\.yaml .*Not a directory.*\[unwritable-file\]"):
        init_recipe(file / "x")
    with pytest.raises(RecipeError, match=r"'my model' .*\[wrong-folder-name\]"):
        init_recipe(Path("my model"))
    assert file.read_text() == "mine" and not Path("my model").exists()
    for name in ("123", "null", "on"):  # YAML reads it as text only in quotes
        assert load_recipe(init_recipe(Path(name)).parent).pipeline.recipe.release.model_name == name


def test_a_name_dagster_cannot_take_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"'my model' .*\[wrong-folder-name\]"):
        load_recipe(write_recipe(tmp_path / "my model", ATTRIBUTES))


def test_a_recipe_that_would_start_itself_again_is_refused(tmp_path):
    attributes = {**ATTRIBUTES, "reference": {"model": "models:/small@champion"}}
    with pytest.raises(RecipeError, match="on_change: false"):
        load_recipe(write_recipe(tmp_path / "loop", attributes))
    attributes["automation"] = {"on_change": False, "cron": "0 6 * * 1"}
    load_recipe(write_recipe(tmp_path / "weekly", attributes))
