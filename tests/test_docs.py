"""Compare the documentation with the program: fields, defaults, examples and links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from pydantic import BaseModel

from assets.bodies.checks import check_specs
from assets.pipeline.graph import GRAPH
from training.contract.config.optimizer import Muon
from training.contract.config.recipe import Recipe
from training.contract.config.training import Adapter, SupervisedTuning, Training
from training.contract.config.variants import RecipeDocument, merged
from training.launch.cluster.engine_file import read_engine
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
    """Yield the names of all leaf fields of a section, also of sections in lists and unions."""
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
    documented = re.findall(r"^\|[^|]*\| `(\w+)`( \(a warning\))? \|", LINEAGE_PAGE, re.MULTILINE)
    assert {(name, not warning) for name, warning in documented} == {(spec.name, spec.blocking) for spec in specs}


def test_every_metric_of_pairs_is_in_the_documents():
    assert set(METRICS) <= set(re.findall(r"`([a-z_/]+)`", LINEAGE_PAGE.partition("## Metrics")[2]))


def documented_defaults() -> Iterator[tuple[str, Any]]:
    """Yield (field, default) of the table of fields. A row of several names has as many defaults, or one for all."""
    for names, default, _ in ROW.findall(RECIPE_PAGE):
        fields = re.findall(r"`([^`]+)`", names)
        section = fields[0].rpartition(".")[0]
        documented = default.split(", ") if len(fields) > 1 and ", " in default else [default] * len(fields)
        for field, text in zip(fields, documented, strict=True):
            if text:
                path = field if "." in field else f"{section}.{field}"
                yield path, WORDS[text] if text in WORDS else yaml.safe_load(text.strip("`"))


@pytest.mark.parametrize(("path", "documented"), list(documented_defaults()))
def test_documented_default_is_the_default(path: str, documented: Any):
    found: Any = {**RESOLVED, "variants": {"<name>": None}}
    for name in path.replace("[]", ".0").split("."):
        found = found[int(name)] if isinstance(found, list) else found[name]
    assert is_default(documented, found)


@pytest.mark.parametrize(("field", "section"), [("reference.sft", SupervisedTuning), ("training.adapter", Adapter)])
def test_documented_defaults_of_an_optional_section_are_the_defaults(field: str, section: type[BaseModel]):
    [text] = [text for names, _, text in ROW.findall(RECIPE_PAGE) if names == f"`{field}`"]
    documented = dict(re.findall(r"`([a-z_]+)` `?([\w.-]+)", text))
    found = section().model_dump(mode="json")
    assert len(documented.keys() & found.keys()) > 1
    assert all(is_default(documented[name], found[name]) for name in documented.keys() & found.keys())


def is_default(documented: Any, found: Any) -> bool:
    """Return whether the documented default is the real one. YAML reads 5e-7 as text. A section may be documented in part."""
    if isinstance(documented, dict):
        return all(is_default(value, found[name]) for name, value in documented.items())
    if isinstance(documented, list):
        return all(is_default(*both) for both in zip(documented, found, strict=True))
    return documented == found or str(documented) == str(found) or float(documented) == found


def examples() -> Iterator[Any]:
    """Yield the recipes, sections and parts of `training` in the YAML blocks of all pages."""
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
    [documented] = [e["training"]["optimizer"] for e in examples() if "muon" in str(e)]
    assert is_default(documented, Muon(type="muon").model_dump(mode="json"))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    return {
        re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in re.findall("^#+ (.*)", text, re.M)
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page: str):
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), target


def test_manifest_of_kubeflow_has_only_fields_of_its_api() -> None:
    """The models of the API drop unknown fields, so the manifest must come back as it is."""
    [manifest] = [
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", PAGES["docs/clusters.md"], re.DOTALL)
        if "TrainJob" in block
    ]
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None and job.to_dict() == manifest


def test_engine_files_in_the_documents_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(engine: .*?)```", PAGES["docs/clusters.md"], re.DOTALL)
    for block in blocks:
        (file := tmp_path / "engine.yaml").write_text(block)
        read_engine(file)
    assert len(blocks) == 2
