"""The graph gives plain text to Dagster, which cannot serialize members of an enum."""

import pytest

from assets.pipeline.graph import GRAPH, Node
from tests import factories


@pytest.mark.parametrize(("asset", "node"), GRAPH.items(), ids=list(GRAPH))
def test_names_in_the_graph_are_plain_text(asset: str, node: Node):
    assert {type(name) for name in (asset, *node.needs, *node.inputs(factories.recipe()))} == {str}
