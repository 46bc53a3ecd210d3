"""The causes of an edit on the page of an asset, in a real browser, with the servers and the daemon of `pedigree ui`."""

import html
import time

import pytest

from tests.workflows.homes import ATTRIBUTES, Home, edit
from tests.workflows.servers.served import served_pages
from tests.workflows.servers.test_web_servers import graphql, text_in_browser

pytestmark = [pytest.mark.slow, pytest.mark.system]
EDITED = {
    **ATTRIBUTES,
    "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}},
    "automation": {"on_change": False},
}
QUERY = """{ assetNodes { assetKey { path } staleStatus
  assetObservations(limit: 9) { metadataEntries { label ... on TextMetadataEntry { text } } } } }"""


def small(address):
    """Return Dagster's mark, and the observed states, of every asset of the recipe."""
    nodes = [n for n in graphql(address, QUERY)["assetNodes"] if n["assetKey"]["path"][0] == "small"]
    return {
        node["assetKey"]["path"][1]: (
            node["staleStatus"],
            [e["text"] for o in node["assetObservations"] for e in o["metadataEntries"] if e["label"] == "state"],
        )
        for node in nodes
    }


def test_the_page_of_an_asset_shows_the_causes_of_an_edit(checkout, tmp_path):
    edit(checkout, EDITED)
    environment = Home(checkout.home).environment
    with served_pages(checkout.home, checkout.folder, environment) as served:
        address = served.dagster
        deadline = time.monotonic() + 240
        while not (found := small(address))["released_model"][1]:
            assert time.monotonic() < deadline, found
            time.sleep(2)
        found = small(address)  # one query reads the assets one after the other, while they are observed
        below = {"training_spec", "evaluation_spec", "policy", "evaluation", "released_model"}
        assert {asset: states for asset, (_, states) in found.items() if states} == {
            asset: ["stale"] for asset in below
        }
        assert found["policy"][0] == "FRESH", "Dagster's own mark; an observation leaves it alone"
        page = html.unescape(text_in_browser(f"{address}/assets/small/policy?view=events", tmp_path / "profile"))
        assert "Observed" in page and "training_spec: loss.beta 0.1 -> 0.2" in page, page[-2000:]
