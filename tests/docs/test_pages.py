"""Compare the pages with the program: examples, links, and the length of table cells."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.docs.pages import PAGES, ROOT, blocks, cells, prose
from training.contract.config.data_source import Format
from training.contract.config.loss import LossType
from training.contract.config.training import Training
from training.contract.config.variants import RecipeDocument, merged
from training.launch.cluster.engine_file import read_engine
from workflows.cli.main import COMMANDS

MINIMAL = {"data": {"sources": [{"path": "x"}]}, "reference": {"model": "y"}, "release": {"model_name": "z"}}
MOST_WORDS = 25
CLUSTERS = "docs/guides/clusters.md"


def examples() -> Iterator[Any]:
    """Yield the recipes, sections and parts of `training` in the YAML blocks of all pages."""
    for page in PAGES:
        for block in blocks(page, "yaml"):
            content = yaml.safe_load(block)
            content = content.get("attributes", content)
            content = {"training": content} if content.keys() <= Training.model_fields.keys() else content
            if content.keys() <= RecipeDocument.model_fields.keys():
                yield {name: value for name, value in content.items() if value != "..."}


@pytest.mark.parametrize("content", list(examples()), ids=lambda content: "-".join(content))
def test_example_of_a_page_is_a_recipe(content: dict[str, Any]):
    RecipeDocument.model_validate(merged(MINIMAL, content))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall("^#+ (.*)", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_link_of_a_page_has_its_target(page: str):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(PAGES[page])):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target


def referenced() -> Iterator[tuple[str, str]]:
    """Yield (file, page with anchor) of each mention of a page in the code."""
    tops = ("assets", "mlflow", "training", "workflows")
    for path in [ROOT / "pedigree.py", *(path for top in tops for path in sorted((ROOT / top).rglob("*.py")))]:
        for target in re.findall(r"(?<![\w/.])docs/[\w/.-]+\.md(?:#[\w-]+)?", path.read_text(encoding="utf-8")):
            yield path.relative_to(ROOT).as_posix(), target


@pytest.mark.parametrize(("file", "target"), list(referenced()))
def test_page_named_in_the_code_exists(file: str, target: str):
    page, _, anchor = target.partition("#")
    assert page in PAGES and (not anchor or anchor in anchors(PAGES[page]))


@pytest.mark.parametrize("page", PAGES)
def test_cell_of_a_table_has_at_most_25_words(page: str):
    assert [cell for cell in cells(PAGES[page]) if len(cell.split()) > MOST_WORDS] == []


@pytest.mark.parametrize(
    ("page", "section", "names"),
    [
        ("losses", "Formulas", set(LossType) - {"mixture"}),
        ("data-formats", "Formats", set(get_args(Format)) - {"auto"}),
        ("json", "JSON output", COMMANDS.keys() - {"chat", "schema", "serve", "ui"}),
    ],
)
def test_table_of_a_page_has_a_row_for_each_name(page: str, section: str, names: set[str]) -> None:
    text = PAGES[f"docs/reference/{page}.md"].partition(f"# {section}\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)} == names


def test_manifest_of_kubeflow_has_only_fields_of_its_api() -> None:
    """The models of the API drop unknown fields, so the manifest must come back as it is."""
    [manifest] = [yaml.safe_load(block) for block in blocks(CLUSTERS, "yaml") if "TrainJob" in block]
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None and job.to_dict() == manifest


def test_engine_files_in_the_guide_are_valid(tmp_path: Path) -> None:
    texts = [block for block in blocks(CLUSTERS, "yaml") if block.startswith("engine: ")]
    for text in texts:
        (file := tmp_path / "engine.yaml").write_text(text)
        read_engine(file)
    assert len(texts) == 2
