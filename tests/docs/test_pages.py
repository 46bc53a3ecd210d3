"""Check the fences of tutorial, quickstart and guides without running them: recipes, engine files, options, marks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.docs.page import PAGES, Fence, fences
from training.contract.config.recipe import Recipe
from training.contract.config.training import Training
from training.contract.config.variants import RecipeDocument, merged
from training.launch.cluster.engine_file import read_engine
from workflows.cli.main import main

MINIMAL = {"data": {"sources": [{"path": "x"}]}, "reference": {"model": "y"}, "release": {"model_name": "z"}}
MOST_SKIPPED = 12
FENCES = [fence for page in PAGES.values() for fence in fences(page)]
COMMAND = re.compile(r"(?:^|[|;&$`(] *|/)pedigree +(?!--)([a-z]+)((?: [^`|;&>#\n]*)?)", re.MULTILINE)


def yaml_fences() -> list[Fence]:
    return [fence for fence in FENCES if fence.language == "yaml" and fence.mark != "skip"]


@pytest.mark.parametrize("fence", yaml_fences(), ids=lambda fence: fence.place)
def test_yaml_fence_is_a_recipe_an_engine_file_or_a_train_job(fence: Fence, tmp_path: Path):
    content = yaml.safe_load(fence.text)
    if "apiVersion" in content:
        job = TrainerV1alpha1TrainJob.from_dict(content)
        assert job is not None and job.to_dict() == content, "the API's models drop unknown fields"
        return
    if "engine" in content:
        (file := tmp_path / "engine.yaml").write_text(fence.text)
        read_engine(file)
        return
    content = content.get("attributes", content)
    RecipeDocument.model_validate(merged(MINIMAL, in_recipe(content)))


def in_recipe(content: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `training` within their section; anything else as it is."""
    is_section = content.keys() <= Training.model_fields.keys() and not content.keys() & Recipe.model_fields.keys()
    return {"training": content} if is_section else content


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Yield (page, subcommand, arguments) of each `pedigree` line in the pages, also in code within a sentence."""
    for name, page in PAGES.items():
        for subcommand, rest in COMMAND.findall(page.read_text()):
            yield name, subcommand, shlex.split(rest)


@pytest.mark.parametrize(("name", "subcommand", "arguments"), list(commands()))
def test_command_of_a_page_has_known_options(name: str, subcommand: str, arguments: list[str]):
    context = click.Context(main)
    command = main.get_command(context, subcommand)
    assert command is not None, f"{name}: pedigree {subcommand}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {argument for argument in arguments if argument.startswith("-")} <= known | {"--help"}, name


def test_pages_have_commands_and_recipes():
    assert len(list(commands())) > 40 and len(yaml_fences()) > 15


def test_few_fences_are_skipped():
    skipped = [fence.place for fence in FENCES if fence.mark == "skip"]
    assert len(skipped) <= MOST_SKIPPED, skipped


def test_fences_have_known_languages():
    known = {"bash", "python", "text", "yaml", "json", "jinja"}
    assert [fence.place for fence in FENCES if fence.language not in known] == []


@pytest.mark.parametrize("name", PAGES)
def test_table_cells_are_short(name: str):
    rows = [line for line in PAGES[name].read_text().splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
    assert [cell for cell in cells if len(re.sub(r"\]\([^)]*\)", "]", cell).split()) > 25] == []
