"""The tables that Sphinx inserts: each part of the code has one, and rows hold its fields."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError
from pydantic import BaseModel

from docs._ext.field_tables import ENGINE, fields_table, section_at, sections_of, type_text
from docs._ext.generated import TABLES, generate
from tests.docs.pages import PAGES, ROOT, directives
from training.contract.config.loss import LossType
from training.contract.config.variants import RecipeDocument
from training.contract.protocol.metrics import HELD_OUT_METRICS, STEP_METRICS
from training.losses.preference import METRICS
from workflows.cli.main import main
from workflows.recipes.recipe_schema import recipe_schema

DEMO = yaml.safe_load((ROOT / "workflows/defs/demo/defs.yaml").read_text())


def used(name: str) -> list[str]:
    """Return the arguments of the tables of one kind in all pages."""
    arguments = [argument for text in PAGES.values() for argument in directives(text)]
    return [argument.partition(" ")[2] for argument in arguments if argument.partition(" ")[0] == name]


def sections(section: type[BaseModel] = RecipeDocument) -> Iterator[type[BaseModel]]:
    """Yield all sections below a section."""
    for field in section.model_fields.values():
        for inner in sections_of(field):
            yield inner
            yield from sections(inner)


def test_recipe_tables_cover_every_section_once():
    documented = [section for path in used("recipe") for section in section_at(path)]
    assert len(documented) == len(set(documented)) and set(documented) == set(sections())


def test_engine_tables_cover_every_engine():
    assert sorted(used("engine")) == sorted(ENGINE)


def test_other_tables_are_in_a_page():
    assert {name for name in TABLES if used(name)} == TABLES.keys()
    assert sorted(used("metrics")) == ["held-out", "step", "votes"]


@pytest.mark.parametrize(
    "section", list(dict.fromkeys([*sections(), *ENGINE.values()])), ids=lambda kind: kind.__name__
)
def test_table_of_a_section_has_a_row_with_a_description_for_each_field(section: type[BaseModel]):
    rows = fields_table(section).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| `") for row in rows] == list(section.model_fields)
    assert all(row.endswith(". |") for row in rows)


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("training.optimizer", "| `learning_rate` | number, above 0 | `5e-7` | The highest learning rate"),
        ("training.optimizer", "| `betas` | list of 2 numbers | `[0.9, 0.999]` |"),
        ("reference.sft", "| `optimizer` | section | `{learning_rate: 2e-5}` |"),
        ("data", "| `sources` | list of sections | required |"),
        ("data", "| `validation_fraction` | number, at least 0, below 1 | `0.1` |"),
        ("training", "| `seed` | integer | `0` |"),
        ("training.loss", "| `ld_alpha` | number, at least 0, at most 1 | none |"),
        ("training.adapter", "| `target_modules` | `all-linear` or list of text | `all-linear` |"),
        ("tokenization", "| `date` | date | none |"),
        ("compute", "| `compile` | boolean | `false` |"),
        ("release.gate", "| `min_accuracy_of` | mapping | `{}` |"),
    ],
)
def test_recipe_table_shows_type_and_default(path: str, row: str):
    assert row in generate(f"recipe {path}")


def test_type_of_a_limit_that_only_guards_is_left_out():
    assert type_text(RecipeDocument.model_fields["compute"]) == "section"
    assert type_text(section_at("compute")[0].model_fields["nodes"]) == "integer, at least 1"


def test_metrics_of_pairs_have_meanings():
    assert set(METRICS) <= STEP_METRICS.keys()
    assert {f"eval/{name}" for name in METRICS} <= HELD_OUT_METRICS.keys()


def test_losses_table_has_every_type_of_loss():
    rows = generate("losses").splitlines()[2:]
    assert [row.split(" | ")[0].strip("| `") for row in rows] == [kind for kind in LossType if kind != "mixture"]


def test_schema_accepts_a_recipe_and_refuses_an_unknown_field():
    validator = Draft202012Validator(recipe_schema())
    validator.validate(DEMO)
    with pytest.raises(ValidationError, match="batchsize"):
        validator.validate({**DEMO, "attributes": {**DEMO["attributes"], "training": {"batchsize": 8}}})


def test_schema_command_prints_the_schema():
    assert json.loads(CliRunner().invoke(main, ["schema"]).stdout) == recipe_schema()


@pytest.mark.slow
def test_pages_build_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "recipe.schema.json").exists() and "warmup_ratio" in (
        tmp_path / "reference/recipe.html"
    ).read_text()
