"""What people read is held against the program: fields, their defaults, examples and links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from assets.bodies.checks import check_specs
from assets.pipeline.graph import GRAPH
from training.contract.config.optimizer import Muon
from training.contract.config.recipe import Adapter, Recipe, SupervisedTuning, Training
from training.contract.config.variants import RecipeDocument, merged
from training.losses.preference import METRICS
from workflows.recipes.discovery import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
RECIPE_PAGE, LINEAGE_PAGE = PAGES["docs/recipe.md"], PAGES["docs/lineage.md"]
MINIMAL = {"data": {"sources": [{"path": "x"}]}, "reference": {"model": "y"}, "release": {"model_name": "z"}}
RESOLVED = Recipe.model_validate(MINIMAL).model_dump(mode="json")
ROW = re.compile(r"^\| (`[a-z]+\..*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
WORDS = {"none": None, "the base model's": None, "the tokenizer's": None}


def leaves(section: type[BaseModel]) -> Iterator[str]:
    """The names of all fields that are no sections, in whatever list or union they stand."""
    for name, field in section.model_fields.items():
        kinds = [part for kind in (field.annotation, *get_args(field.annotation)) for part in (kind, *get_args(kind))]
        inner = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)}
        yield from (leaf for kind in inner for leaf in leaves(kind)) if inner else [name]


def test_every_field_is_in_the_documents():
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", RECIPE_PAGE + PAGES["docs/losses.md"], re.DOTALL))
    assert set(leaves(RecipeDocument)) - set(re.findall(r"[a-z_]+", code)) == set()


def test_every_check_is_in_the_documents():
    pipeline = load_recipe(ROOT / "workflows/defs/demo").pipeline
    specs = [spec for asset in GRAPH for spec in check_specs(pipeline, asset)]
    told = re.findall(r"^\|[^|]*\| `(\w+)`( \(a warning\))? \|", LINEAGE_PAGE, re.MULTILINE)
    assert {(name, not warning) for name, warning in told} == {(spec.name, spec.blocking) for spec in specs}


def test_every_metric_of_pairs_is_in_the_documents():
    assert set(METRICS) <= set(re.findall(r"`([a-z_/]+)`", LINEAGE_PAGE.partition("## Metrics")[2]))


def told_defaults() -> Iterator[tuple[str, Any]]:
    """Of the table of fields: in a row of several names as many defaults, between commas, or one for all."""
    for names, default, _ in ROW.findall(RECIPE_PAGE):
        fields = re.findall(r"`([^`]+)`", names)
        section = fields[0].rpartition(".")[0]
        told = default.split(", ") if len(fields) > 1 and ", " in default else [default] * len(fields)
        for field, words in zip(fields, told, strict=True):
            if words:
                path = field if "." in field else f"{section}.{field}"
                yield path, WORDS[words] if words in WORDS else yaml.safe_load(words.strip("`"))


@pytest.mark.parametrize(("path", "told"), list(told_defaults()))
def test_a_default_is_what_the_table_says(path: str, told: Any):
    found: Any = {**RESOLVED, "variants": {"<name>": None}}
    for name in path.replace("[]", ".0").split("."):
        found = found[int(name)] if isinstance(found, list) else found[name]
    assert says(told, found)


@pytest.mark.parametrize(("field", "section"), [("reference.sft", SupervisedTuning), ("training.adapter", Adapter)])
def test_the_defaults_of_an_optional_section_are_what_the_table_says(field: str, section: type[BaseModel]):
    [text] = [text for names, _, text in ROW.findall(RECIPE_PAGE) if names == f"`{field}`"]
    told = dict(re.findall(r"`([a-z_]+)` `?([\w.-]+)", text))
    found = section().model_dump(mode="json")
    assert len(told.keys() & found.keys()) > 1
    assert all(says(told[name], found[name]) for name in told.keys() & found.keys())


def says(told: Any, found: Any) -> bool:
    """Whether a default is the one that was told; YAML reads 5e-7 as text. A section may be told in part."""
    if isinstance(told, dict):
        return all(says(value, found[name]) for name, value in told.items())
    if isinstance(told, list):
        return all(says(*both) for both in zip(told, found, strict=True))
    return told == found or str(told) == str(found) or float(told) == found


def examples() -> Iterator[Any]:
    """The recipes, sections and parts of `training` among the YAML of all pages."""
    for text in PAGES.values():
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
            content = yaml.safe_load(block)
            content = content.get("attributes", content)
            content = {"training": content} if content.keys() <= Training.model_fields.keys() else content
            if content.keys() <= RecipeDocument.model_fields.keys():
                yield {name: value for name, value in content.items() if value != "..."}


@pytest.mark.parametrize("content", list(examples()), ids=lambda content: "-".join(content))
def test_an_example_is_a_recipe(content: dict[str, Any]):
    RecipeDocument.model_validate(merged(MINIMAL, content))


def test_the_defaults_of_muon_are_those_of_the_example():
    [told] = [e["training"]["optimizer"] for e in examples() if "muon" in str(e)]
    assert says(told, Muon(type="muon").model_dump(mode="json"))


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    return {
        re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in re.findall("^#+ (.*)", text, re.M)
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        place = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place.read_text()), target
