"""Errors about missing inputs of a recipe name file, line, field and value, as the user wrote them."""

from pathlib import Path

import pytest

from assets.inputs.recipe_location import add_recipe_location, written
from assets.inputs.recipe_yaml import FieldInFile, find_field
from training.contract.errors import DataError, ModelError, PedigreeError, RegistryUnavailable, without_code
from workflows.recipes.discovery import load_recipes

# Lines are counted by hand.
RECIPE = """\
type: workflows.PreferenceTuning
attributes:
  data:
    sources:
    - path: here.jsonl
    - {path: "there-*.jsonl"}
  reference:
    model: models:/nobody@champion
  release: {model_name: small}
  training: &first
    max_grad_norm: 2
  variants:
    other: {reference: {model: ./nowhere}, training: {<<: *first, seed: 4}}
    same: {training: {seed: 3}}
"""


@pytest.fixture
def pipelines(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "defs.yaml").write_text(RECIPE)
    return {loaded.pipeline.variant: loaded.pipeline for loaded in load_recipes(folder)}


@pytest.mark.parametrize(
    ("variant", "field", "place"),
    [
        (None, "reference.model", ":8: reference.model: models:/nobody@champion"),
        (None, "data.sources.1.path", ":6: data.sources.1.path: there-*.jsonl"),
        (None, "tokenization.chat_template", ": tokenization.chat_template"),
        ("other", "reference.model", ":13: variants.other.reference.model: ./nowhere"),
        ("same", "reference.model", ":8: reference.model: models:/nobody@champion"),
    ],
)
def test_error_begins_with_the_location_of_its_field(pipelines, variant, field, place):
    pipeline = pipelines[variant]
    for kind in (ModelError, DataError):
        with pytest.raises(kind) as caught, written(pipeline, field):
            raise kind("it is not there")
        assert str(caught.value) == f"{pipeline.file}{place}: it is not there [{kind.code}]"


def test_file_removed_meanwhile_is_named(pipelines):
    pipelines[None].file.unlink()
    with (
        pytest.raises(PedigreeError, match=r"defs\.yaml: reference\.model: gone"),
        written(pipelines[None], "reference.model"),
    ):
        raise ModelError("gone")


def test_error_of_a_server_has_no_recipe_location(pipelines):
    with (
        pytest.raises(RegistryUnavailable, match=r"^no answer \[registry-unavailable\]$"),
        written(pipelines[None], "reference.model"),
    ):
        raise RegistryUnavailable("no answer")


@pytest.mark.parametrize(
    ("variant", "message", "place"),
    [
        (None, "`data.sources.1` (there-a.jsonl ...) has no row", ":6: data.sources.1: "),
        (None, "`data.sources` has none", ":4: data.sources: "),
        (None, "`training.max_grad_norm: 2` is too much", ":11: training.max_grad_norm: 2: "),
        ("other", "`training.max_grad_norm` is too much", ":11: variants.other.training.max_grad_norm: 2: "),
        ("other", "`training.seed` is wrong", ":13: variants.other.training.seed: 4: "),
        ("same", "`training.max_grad_norm` is too much", ":11: training.max_grad_norm: 2: "),
        (None, "`training.seed: 0` is a default", None),
        (None, "no memory: lower `training.max_grad_norm`", None),
        (None, "`pedigree run` is what to type", None),
        (None, "nothing is named", None),
    ],
)
def test_error_that_begins_with_a_field_gets_its_location(pipelines, variant, message, place):
    """A field further behind may be a remedy, and is not the cause."""
    pipeline = pipelines[variant]
    with pytest.raises(DataError) as caught, add_recipe_location(pipeline):
        raise DataError(message)
    assert without_code(str(caught.value)) == (message if place is None else f"{pipeline.file}{place}{message}")
    with pytest.raises(DataError) as again, add_recipe_location(pipeline):
        raise caught.value
    assert str(again.value) == str(caught.value)


WRITTEN = """\
type: workflows.PreferenceTuning
attributes:
  rate: 1.0e-3
  flag: yes
  nothing: ~
  sum: !!int 5
  base: &base
    first: 1
    second: 2
  merged:
    <<: [{first: 7}, *base]
    second: 3
"""


@pytest.mark.parametrize(
    ("field", "line", "text"),
    [
        ("rate", 3, "1.0e-3"),
        ("flag", 4, "yes"),
        ("nothing", 5, "~"),
        ("sum", 6, "5"),
        ("base", 7, None),
        ("merged.first", 11, "7"),
        ("merged.second", 12, "3"),
    ],
)
def test_find_field_returns_the_line_and_the_text_as_written(tmp_path: Path, field, line, text):
    file = tmp_path / "defs.yaml"
    file.write_text(WRITTEN)
    assert find_field(file, field.split(".")) == FieldInFile(line, text)


@pytest.mark.parametrize("content", ["", "- 1\n", "attributes: {}\n", "a: [\n", "a: &a [*a]\n", "a: " + "[" * 3000])
def test_find_field_returns_none_without_the_field(tmp_path: Path, content):
    file = tmp_path / "defs.yaml"
    file.write_text(content)
    assert find_field(file, ["rate"]) is None
