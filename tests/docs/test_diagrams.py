"""The picture of the graph has the graph's assets and edges, and each edge begins and ends at the box of its asset."""

import re
from xml.etree import ElementTree

import pytest

from assets.pipeline.graph import GRAPH
from tests.docs.pages import ROOT
from training.contract.config.variants import RecipeDocument

SVG = "{http://www.w3.org/2000/svg}"
IMAGES = ROOT / "docs" / "images"
PICTURE = ElementTree.parse(IMAGES / "assets.svg").getroot()
# A recipe in which every asset has all the inputs that it may have.
FULL = RecipeDocument.model_validate(
    {
        "data": {"sources": [{"path": "x", "name": "a"}]},
        "reference": {"model": "y", "sft": {}},
        "release": {"model_name": "z"},
    }
)


def boxes() -> dict[str, tuple[float, float, float, float]]:
    """Return left, top, right and bottom of each asset's box."""
    found = {}
    for group in PICTURE.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert group.find(f"{SVG}text").text == group.get("data-asset")
        found[group.get("data-asset")] = (x, y, x + width, y + height)
    return found


EDGES = [path for path in PICTURE.iter(f"{SVG}path") if path.get("data-from")]


def test_picture_has_the_assets_of_the_graph() -> None:
    assert boxes().keys() == GRAPH.keys()


def test_picture_has_the_edges_of_the_graph() -> None:
    drawn = {(edge.get("data-from"), edge.get("data-to"), edge.get("class") == "optional") for edge in EDGES}
    expected = {
        (need, name, need not in node.needs) for name, node in GRAPH.items() for need in node.inputs(FULL.recipe)
    }
    assert drawn == expected and len(EDGES) == len(expected)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.get('data-from')}-{edge.get('data-to')}")
def test_edge_begins_and_ends_at_the_border_of_its_box(edge: ElementTree.Element) -> None:
    points = [tuple(map(float, point.split(","))) for point in re.findall(r"[\d.]+,[\d.]+", edge.get("d"))]
    for (x, y), name in ((points[0], edge.get("data-from")), (points[-1], edge.get("data-to"))):
        left, top, right, bottom = boxes()[name]
        assert left <= x <= right and top <= y <= bottom and (x in (left, right) or y in (top, bottom)), name


@pytest.mark.parametrize("name", sorted(path.name for path in IMAGES.glob("*.svg")))
def test_picture_has_a_title_and_a_description(name: str) -> None:
    root = ElementTree.parse(IMAGES / name).getroot()
    assert all(root.find(f"{SVG}{part}").text for part in ("title", "desc"))
