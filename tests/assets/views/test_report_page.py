"""The header about the release in the report of an evaluation."""

from dataclasses import replace

import pytest

from assets.views.report_page import ReleaseSummary, add_release
from tests.training.evaluation.pages import HOSTILE, page_of
from tests.training.evaluation.parsed_page import Page, lines_of

SUMMARY = ReleaseSummary(
    recipe="demo",
    version=3,
    registered_model="helper",
    date="2026-05-04 03:02 UTC",
    is_champion=True,
    reasons=["its accuracy is 81.0%, the champion's 75.0%", "no leakage"],
    links={"the version in MLflow": "http://127.0.0.1:5000/#/models/helper?a=1&b=2", "files": "/data/store"},
)
OLD = "<!doctype html>\n<html>\n<body>\n<h1>Evaluation</h1>\n<p>abc</p>\n</body>\n</html>\n"


def test_add_release_puts_a_header_below_the_title_and_changes_nothing_else():
    page = page_of()
    found = add_release(page, SUMMARY)
    before, after = page.split("<!-- release -->\n")
    assert found.startswith(before) and found.endswith(after)
    header = lines_of(found.removeprefix(before).removesuffix(after))
    assert header.splitlines() == [
        "Version 3 of helper is the champion",
        "Recipe demo, 2026-05-04 03:02 UTC",
        "Decision of the gate:",
        *SUMMARY.reasons,
        "the version in MLflow",
        "files: /data/store",
    ]
    assert Page(found).addresses == ["http://127.0.0.1:5000/#/models/helper?a=1&b=2"]


@pytest.mark.parametrize("page", [page_of(), OLD], ids=["report", "old report"])
def test_add_release_twice_replaces_the_header(page):
    later = replace(SUMMARY, version=4, is_champion=False, reasons=[])
    found = add_release(add_release(page, SUMMARY), later)
    assert found == add_release(page, later)
    assert "Version 4 of helper is not the champion" in found and "Version 3" not in found


def test_add_release_to_an_old_report_puts_the_header_first():
    found = add_release(OLD, SUMMARY)
    before, after = OLD.split("<h1>")
    assert found.startswith(f"{before}<!-- release -->\n<section") and found.endswith(
        f"</section>\n<!-- end of release -->\n<h1>{after}"
    )


def test_add_release_with_hostile_texts_escapes_them():
    """The address of a link must begin with http, because a link could run a script. It is shown as text then."""
    hostile = f"{HOSTILE}<!-- end of release -->"
    links = {hostile: "javascript:alert(3)", "b": f"https://example.org/{hostile}"}
    texts = replace(SUMMARY, recipe=hostile, registered_model=hostile, date=hostile, reasons=[hostile], links=links)
    harmless = replace(SUMMARY, reasons=["x"], links={"a": "y", "b": "https://example.org"})
    page, same = Page(add_release(page_of(), texts)), Page(add_release(page_of(), harmless))
    assert page.tags == same.tags and page.attributes == same.attributes
    assert page.addresses == [f"https://example.org/{hostile}"]
    assert "".join(page.text).count(hostile) == 5
    assert add_release(add_release(page_of(), texts), SUMMARY) == add_release(page_of(), SUMMARY)
