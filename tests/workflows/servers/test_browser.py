"""A day with the pages in a real browser: from the graph to a released version, as a user clicks.

Servers, daemon, training and browser are real. The tests read what the pages show.
"""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, ViewportSize, expect, sync_playwright

from assets.pipeline.graph import GRAPH
from tests.browser import FLAGS, chromium
from tests.workflows.commands.test_run_interruption import LONG, until_steps
from tests.workflows.homes import Home, write_recipe
from tests.workflows.servers.served import Served, served_pages

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1500)]
SECOND = 1000.0  # in the unit of Playwright
PHONE = ViewportSize(width=390, height=844)
SHORT = {**LONG, "training": {**LONG["training"], "max_steps": 12}}


@dataclass(frozen=True)
class Day:
    """A browser page, and the servers of `pedigree ui` over an empty home with one recipe."""

    page: Page
    served: Served
    home: Path
    recipe: Path

    def open_asset(self, asset: str) -> None:
        self.page.goto(f"{self.served.dagster}/assets/{self.recipe.name}/{asset}")

    def materialize(self) -> str:
        """Click "Materialize all" on the page of the graph. Return the address of the run."""
        self.page.goto(self.served.graph)
        self.page.get_by_role("button", name="Materialize all").click()
        self.page.get_by_text("View", exact=True).click()
        self.page.wait_for_url(re.compile("/runs/"))
        return self.page.url

    def see_graph_legible(self) -> None:
        """Check that the graph opens with every asset, in letters of at least 8 pixels."""
        self.page.goto(self.served.graph)
        for asset in GRAPH:
            name = self.page.get_by_text(asset, exact=True).first
            expect(name).to_be_visible()
            box = name.bounding_box()
            assert box is not None and box["height"] >= 8, asset

    def reload_definitions(self) -> None:
        self.page.goto(self.served.graph)
        self.page.get_by_role("button", name="Reload definitions").click()
        expect(self.page.get_by_text(re.compile("reloaded", re.IGNORECASE)).first).to_be_visible()

    def wait_for_event(self, asset: str, text: str, seconds: float = 150) -> None:
        """Reload the page of an asset's events until it shows `text`."""
        deadline = time.monotonic() + seconds
        while True:
            self.page.goto(f"{self.served.dagster}/assets/{self.recipe.name}/{asset}?view=events")
            try:
                return expect(self.page.get_by_text(text).first).to_be_visible(timeout=10 * SECOND)
            except AssertionError:
                assert time.monotonic() < deadline, f"{asset}: {text} is not among its events"

    def text_of_card(self, asset: str) -> str:
        return self.page.request.get(f"{self.served.dagster}/pages/{self.recipe.name}-{asset}.svg").text()

    def height_of_card(self, asset: str) -> float:
        """Return the height of the result card on the page of an asset, in pixels."""
        self.open_asset(asset)
        card = self.page.get_by_role("img", name="The latest result appears here")
        expect(card).to_be_visible()
        box = card.bounding_box()
        assert box is not None
        return box["height"]

    def wait_for_status(self, status: str, seconds: float = 300) -> None:
        """Wait until the page of a run shows `status`."""
        expect(self.page.get_by_text(status, exact=True).first).to_be_visible(timeout=seconds * SECOND)

    def value_of(self, metadata: str) -> Locator:
        """Return the cell beside the name of a metadata entry, on the page of an asset."""
        row = self.page.locator("tr").filter(has=self.page.get_by_text(metadata, exact=True))
        return row.locator("td").last


@pytest.fixture(scope="module")
def day(small_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    place = tmp_path_factory.mktemp("day")
    recipe = write_recipe(place / "small", with_template(LONG))
    shutil.copy(small_recipe / "preferences.jsonl", recipe)
    shutil.copy(small_recipe / "base" / "chat_template.jinja", recipe / "chat.jinja")
    (recipe / "base").symlink_to(small_recipe / "base")
    home = Home(place / "home")
    with served_pages(home.path, recipe, home.environment) as served, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(60 * SECOND)
        expect.set_options(timeout=60 * SECOND)
        yield Day(page, served, home.path, recipe)
        browser.close()


def with_template(recipe: dict[str, object]) -> dict[str, object]:
    """Return the recipe with its chat template in a file of its own, without automatic runs."""
    tokenization = {"max_length": 128, "chat_template": "chat.jinja"}
    return {**recipe, "tokenization": tokenization, "automation": {"on_change": False}}


def test_a_day_with_the_pages(day: Day) -> None:
    """One story, because each part needs what the part before it made."""
    watch_and_terminate_a_training(day)
    release_after_fewer_steps(day)
    see_the_cause_of_an_edit_and_the_reuse(day)
    read_the_report_on_a_phone(day)
    look_at_charts_and_version(day)


def watch_and_terminate_a_training(day: Day) -> None:
    run = day.materialize()
    day.see_graph_legible()
    until_steps(day.home, 3)
    day.open_asset("policy")
    expect(day.page.get_by_text("charts of the latest training in MLflow")).to_be_visible()
    expect(day.value_of("mlflow").get_by_role("link").first).to_have_attribute(
        "href", re.compile(r"#/experiments/\d+/runs")
    )
    day.page.goto(run)
    expect(day.page.get_by_text(re.compile(r"policy: live charts: http"))).to_be_visible()
    expect(day.page.get_by_text(re.compile(r"policy: \d+ of 4,000 steps, loss")).first).to_be_visible()
    day.page.get_by_role("button", name="Terminate").click()
    day.page.get_by_role("dialog").get_by_role("button", name=re.compile("Terminate")).click()
    day.page.goto(run)
    day.wait_for_status("Canceled", 120)


def release_after_fewer_steps(day: Day) -> None:
    write_recipe(day.recipe, with_template(SHORT))
    day.reload_definitions()
    day.materialize()
    day.wait_for_status("Success")
    day.open_asset("released_model")
    expect(day.value_of("result")).to_contain_text("Version 1 of small is champion")
    assert day.height_of_card("policy") > 150, "it has a picture"


def see_the_cause_of_an_edit_and_the_reuse(day: Day) -> None:
    template = day.recipe / "chat.jinja"
    template.write_text("{#- edited -#}" + template.read_text())
    day.reload_definitions()
    day.wait_for_event("tokenization_spec", "{#- edited -#}")
    assert "Stale: chat template changed" in day.text_of_card("tokenization_spec")
    day.materialize()
    day.wait_for_status("Success")
    assert "Stale" not in day.text_of_card("tokenization_spec")
    for asset, outcome in (("tokenization_spec", "computed"), ("raw_preferences", "reused"), ("policy", "reused")):
        day.open_asset(asset)
        expect(day.value_of("outcome")).to_have_text(outcome)


def read_the_report_on_a_phone(day: Day) -> None:
    day.open_asset("evaluation")
    report = day.page.get_by_role("link", name="report", exact=True).get_attribute("href")
    phone = day.page.context.browser.new_page(viewport=PHONE)
    phone.goto(f"{day.served.dagster}{report}")
    expect(phone.get_by_text(re.compile(r"Version \d of small"))).to_be_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    phone.close()


def look_at_charts_and_version(day: Day) -> None:
    """The edit of the template made a second version of the same policy, so of the same run."""
    day.open_asset("policy")
    charts = day.page.get_by_role("link", name="charts of the latest training in MLflow").get_attribute("href")
    day.page.goto(f"{day.served.dagster}{charts}")
    expect(day.page.get_by_text("small v1").first).to_be_visible()
    first = day.page.get_by_role("heading", level=4).first
    expect(first).to_have_text("rewards/chosen vs rewards/rejected vs rewards/margins")
    day.page.goto(f"{day.served.mlflow}/#/models/small/versions/1?workflowType=machine_learning")
    expect(day.page.get_by_text("Champion: there was no champion before")).to_be_visible()
