"""Check the fences of tutorial, quickstart and guides without running them: recipes, options, marks."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml

from tests.docs.fences import PAGES, Fence, fences
from training.contract.config.recipe import Recipe
from training.contract.config.training import Training
from training.contract.config.variants import RecipeDocument, merged
from workflows.cli.main import main

MINIMAL = {"data": {"sources": [{"path": "x"}]}, "reference": {"model": "y"}, "release": {"model_name": "z"}}
MOST_SKIPPED = 12
FENCES = [fence for page in PAGES.values() for fence in fences(page)]
COMMAND = re.compile(r"(?:^|[|;&$`(] *|/)pedigree +(?!--)([a-z]+)((?: [^`|;&>#\n]*)?)", re.MULTILINE)


def yaml_fences() -> list[Fence]:
    """Return the YAML fences with recipes. test_pages.py checks engine files and the manifest for Kubernetes."""
    others = ("engine:", "apiVersion:")
    return [f for f in FENCES if f.language == "yaml" and f.mark != "skip" and not f.text.startswith(others)]


@pytest.mark.parametrize("fence", yaml_fences(), ids=lambda fence: fence.place)
def test_yaml_fence_is_a_recipe(fence: Fence):
    content = yaml.safe_load(fence.text)
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
