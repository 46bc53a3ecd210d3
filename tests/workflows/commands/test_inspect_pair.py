"""The view of one pair: log-probs of its tokens, and a page on which text of the data stays text."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from assets.views.pair_page import render_page
from assets.views.pair_reader import TokenizedRow, TokenizedSide
from workflows.commands.inspect_pair import inspect_row, inspection_page

HOSTILE = "</span><script>alert(1)</script><img src=x onerror=alert(1)> \" ' &lt;"


class Page(HTMLParser):
    """A page's elements and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def side(text, value):
    return TokenizedSide([1, 2], ["Q", text], [False, True], value, [None, value])


def test_text_of_the_data_is_escaped_in_the_page():
    row = TokenizedRow(3, "train", replace(side(HOSTILE, -2.5), policy_logprob=-1.25), side("no", None))
    page = Page(render_page(HOSTILE, [row]))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "a", "link", "iframe"})
    assert page.text.count(HOSTILE) == 3, "title, heading and token"
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in page.tags
    assert "reference log-prob -2.5000, policy log-prob -1.2500" in page.text
    assert page.text.count("reference log-prob not computed") == 1 and page.text.count("policy log-prob") == 1


def test_the_colour_is_the_log_prob():
    values = [0.0, -5.0, -50.0]
    row = TokenizedSide([1] * 4, list("abcd"), [False, True, True, True], -55.0, [None, *values])
    page = Page(render_page("colours", [TokenizedRow(0, "train", row, row)]))
    spans = [attributes for tag, attributes in page.tags if tag == "span" and attributes.get("title")][:3]
    assert [span["style"] for span in spans] == [f"background: rgba(231,111,81,{a})" for a in ("0.00", "0.50", "1.00")]
    assert all(span["class"] == "trained" for span in spans)
    assert [span["title"] for span in spans] == ["0.0000 nats", "-5.0000 nats", "-50.0000 nats"]


@pytest.mark.slow
def test_the_log_probs_of_the_tokens_add_up(checkout):
    rows = [inspect_row(checkout.pipeline, checkout.services, checkout.instance, row) for row in range(6)]
    page = Page(inspection_page(checkout.pipeline, rows[0]))
    for row in rows:
        for side in (row.chosen, row.rejected):
            values = side.reference_token_logprobs
            assert [value is not None for value in values] == side.mask
            assert sum(v for v in values if v is not None) == pytest.approx(side.reference_logprob, abs=1e-4)
        assert (row.chosen.policy_logprob is None) == (row.split == "train")
    assert f"{rows[0].chosen.reference_logprob:.4f}" in page.text
    assert (checkout.home / "pages" / "small-reference_logprobs.html").is_file()


@pytest.mark.slow
def test_a_pair_that_was_trained_on_is_scored_on_demand(checkout):
    """The policy learnt to prefer the chosen response, so its log-probs have moved from the reference in that direction."""
    where = (checkout.pipeline, checkout.services, checkout.instance)
    trained = next(n for n in range(160) if inspect_row(*where, n).split == "train")
    row = inspect_row(*where, trained, score=True)
    gains = [side.policy_logprob - side.reference_logprob for side in (row.chosen, row.rejected)]
    assert gains[0] > gains[1]
