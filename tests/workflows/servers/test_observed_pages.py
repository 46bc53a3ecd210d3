"""The causes of an edit on the page of an asset, in a real browser, with the servers and the daemon of `pedigree ui`."""

import contextlib
import html
import signal
import subprocess
import time

import pytest

from tests.workflows.homes import ATTRIBUTES, PEDIGREE, Home, edit
from tests.workflows.servers.test_web_servers import graphql, text_in_browser
from workflows.servers.server_processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.system]
EDITED = {
    **ATTRIBUTES,
    "training": {**ATTRIBUTES["training"], "loss": {"beta": 0.2}},
    "automation": {"on_change": False},
}
QUERY = """{ assetNodes { assetKey { path } staleStatus
  assetObservations(limit: 9) { metadataEntries { label ... on TextMetadataEntry { text } } } } }"""


@contextlib.contextmanager
def ui(home: Home, folder):
    """Yield the address of Dagster's pages, served by `pedigree ui` over `home`."""
    ports = ["--port", str(free_port(0)), "--mlflow-port", str(free_port(0))]
    process = subprocess.Popen(
        [PEDIGREE, "ui", str(folder), *ports],
        env=home.environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1].partition("/locations")[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


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
    with ui(Home(checkout.home), checkout.folder) as address:
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
