"""Pages of the latest materializations in `pages/` of Pedigree's home. `pedigree ui` serves them beside Dagster's pages.

They are not artifacts: the next materialization replaces them. Their addresses stay, so descriptions of assets can link them.

    <recipe>-<asset>.svg     the result card
    <recipe>-<page>.html     a page, such as the evaluation's report
    <recipe>-<name>.link     the address of the latest MLflow page; the server redirects to it
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dagster as dg

from assets.pipeline.pipeline import Pipeline
from assets.views.result_card import render_card
from training.contract.protocol.artifacts import AssetName
from training.contract.system.atomic_io import write_durably

SERVED_VARIABLE = "PEDIGREE_PAGES"  # set if Dagster's server serves these pages
PAGES_FOLDER = "pages"
PAGES_PATH = f"/{PAGES_FOLDER}"  # on Dagster's web server
CARD, LINK = ".svg", ".link"

_CHARTS, _REPORT, _PAIRS, _VERSION = "charts", "report.html", "reference_logprobs.html", "version"
_HISTORY = "history.html"
_LINKS: dict[str, dict[str, str]] = {
    AssetName.REFERENCE_LOGPROBS: {"pairs with the log-probs of their tokens": _PAIRS},
    "policy": {"charts of the latest training in MLflow": _CHARTS + LINK},
    "evaluation": {"report": _REPORT, "charts in MLflow": _CHARTS + LINK},
    AssetName.RELEASED_MODEL: {
        "version in MLflow": _VERSION + LINK,
        "report": _REPORT,
        "history of promotions": _HISTORY,
    },
}


def description(pipeline: Pipeline, asset: str, text: str) -> str:
    """Return the description of an asset for its page, with the latest result and links if they are served.

    The text comes first, because the graph shows the beginning alone.
    """
    if not os.environ.get(SERVED_VARIABLE):
        return text
    card = f"![The latest result appears here]({_address(pipeline, asset + CARD)})"
    links = " · ".join(f"[{label}]({_address(pipeline, name)})" for label, name in _LINKS.get(asset, {}).items())
    return "\n\n".join(filter(None, (text, links, card)))


def publish_card(home: Path, pipeline: Pipeline, asset: str, metadata: Mapping[str, Any], stale: str = "") -> None:
    """Write the result card: the sentence in `result`, and the first picture among the metadata.

    `metadata`: plain values of a materialization. Those of earlier versions have no sentence. `stale`: why the result is out of
    date; empty if it is fresh.
    """
    picture = next((value for value in metadata.values() if isinstance(value, str) and value.startswith("![")), None)
    _write(home, pipeline, asset + CARD, render_card(str(metadata.get("result", "")), picture, stale))


def publish_pairs(home: Path, pipeline: Pipeline, page: str) -> dict[str, dg.MetadataValue[Any]]:
    """Write the page of pairs with their log-probs. Return its metadata."""
    return _publish(home, pipeline, _PAIRS, page)


def publish_report(home: Path, pipeline: Pipeline, page: str) -> dict[str, dg.MetadataValue[Any]]:
    """Write the evaluation's report. Return its metadata."""
    return _publish(home, pipeline, _REPORT, page)


def publish_history(home: Path, pipeline: Pipeline, page: str) -> Path:
    """Write the history of the registered model. Return the file."""
    return _write(home, pipeline, _HISTORY, page)


def publish_charts(home: Path, pipeline: Pipeline, link: str) -> None:
    """Let the fixed address of the charts lead to `link`, the page of the latest training."""
    _write(home, pipeline, _CHARTS + LINK, link)


def publish_version(home: Path, pipeline: Pipeline, link: str) -> None:
    """Let the fixed address of the released version lead to `link`."""
    _write(home, pipeline, _VERSION + LINK, link)


def write_page(path: Path, page: str) -> Path:
    """Write `page` into the file `path`, in a new folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, page.encode())
    return path


def _publish(home: Path, pipeline: Pipeline, name: str, page: str) -> dict[str, dg.MetadataValue[Any]]:
    path = _write(home, pipeline, name, page)
    return {
        "page": dg.MetadataValue.url(_address(pipeline, name)),
        "page_file": dg.MetadataValue.path(str(path)),
    }


def _write(home: Path, pipeline: Pipeline, name: str, text: str) -> Path:
    return write_page(home / PAGES_FOLDER / f"{pipeline.name}-{name}", text)


def _address(pipeline: Pipeline, name: str) -> str:
    return f"{PAGES_PATH}/{quote(f'{pipeline.name}-{name}')}"
