"""The page of the report: its texts and numbers, escaping, and its width in a browser."""

import html
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from assets.views.report_page import ReleaseSummary, add_release
from tests.browser import FLAGS, chromium
from tests.training.evaluation.pages import HOSTILE, metrics_of, of_own_prompts, page_of, response, rewards_of
from tests.training.evaluation.parsed_page import Page, lines_of
from training.contract.config.loss import Loss
from training.evaluation.examples import Sample, WorstPair
from training.evaluation.token_rewards import RewardedPair, TokenRewards
from training.scoring.accuracy import accuracy

# Words that no browser breaks by itself: code, a file name, an address.
LONG = " ".join(["x" * 400, f"def {'f_' * 100}(): return {{}}", "/data/" + "folder-" * 60 + ".parquet", "wörter" * 50])


def flat(page: str) -> str:
    """Return the texts of the page in one line, without repeated space."""
    return " ".join(" ".join(Page(page).text).split())


def test_report_with_hostile_texts_escapes_them():
    sample, worst = Sample(1, *[HOSTILE] * 4), WorstPair(7, 2.5, -1.0, *[HOSTILE] * 3)
    page = Page(
        page_of(
            policy=HOSTILE,
            model_name=HOSTILE,
            samples=[sample],
            worst=[worst],
            metrics=metrics_of(**{HOSTILE: 1.0}),
            by_source={HOSTILE: of_own_prompts(1, 1)},
            rewards=rewards_of(HOSTILE),
        )
    )
    same = Sample(1, *["x"] * 4)
    harmless = Page(page_of(metrics=metrics_of(x=1.0), by_source={"x": of_own_prompts(1, 1)}, samples=[same]))
    assert page.tags == harmless.tags and page.attributes == harmless.attributes
    assert "script" not in page.tags and not any(name.startswith("on") for name in page.attributes)
    # Twice the policy; the model, a metric, a source; four of the sample, three of the worst pair; the prompt, three tokens
    # and the strongest of both responses.
    assert "".join(page.text).count(HOSTILE) == 2 + 3 + 4 + 3 + 1 + 3 + 2, "and all of it can be read"


def test_report_forbids_scripts_and_requests():
    page = page_of()
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert Page(page).addresses == [] and "url(" not in page and "@import" not in page


def test_report_begins_with_figures_in_words_and_ends_with_the_metrics():
    """The interval of 2 of 4 by Wilson is 15.0% to 85.0%."""
    page = page_of(metrics=metrics_of(pairs=4000))
    assert re.search(r"<h1>Evaluation</h1>\n<!-- release -->\n<p>", page)
    shown = flat(page)
    for text in (
        "Made on 2026-05-04 03:02 UTC by a recipe that releases helper .",
        "Policy abc against reference def on the held-out pairs of 123 .",
        "Accuracy 50.0% 95% interval 15.0% to 85.0%. Share of 4 pairs whose chosen response has the higher reward.",
        "Loss 0.5000 Type sigmoid. A policy equal to the reference has 0.6931.",
        "Margin +1.0000 nats",
        "Chosen reward +0.7500 nats",
        "Rejected reward -0.2500 nats",
        "A reward is beta (0.1) times the log-ratio",
    ):
        assert text in shown and shown.index(text) < shown.index("Answers before and after")
    assert "5 metrics, by their names in MLflow eval/loss 0.5000" in shown and shown.endswith("eval/pairs 4,000")
    assert shown.index("eval/") > shown.index("Pairs of greatest loss")
    assert "Made on 2026-05-04 03:02 UTC. Policy" in flat(page_of(model_name=""))


@pytest.mark.parametrize(
    ("loss", "meaning"),
    [
        ({"type": "ipo", "beta": 0.5}, "A reward is beta (0.5) times the log-ratio"),
        ({"type": "cpo", "beta": 0.5}, "A reward is beta (0.5) times the log-prob under the policy"),
        ({"type": "simpo", "beta": 2}, "A reward is beta (2) times the mean log-prob of a token under the policy"),
    ],
)
def test_report_explains_the_reward_of_the_loss(loss, meaning):
    assert meaning in flat(page_of(loss=Loss.model_validate(loss)))


def test_report_with_shared_prompts_counts_them():
    shown = flat(page_of(accuracy=accuracy(np.arange(4) < 2, np.array([0, 1, 1, 2]))))
    assert "Share of 4 pairs with 3 prompts whose chosen response" in shown


def test_report_shows_answers_side_by_side_and_says_which_changed():
    changed, same = Sample(5, "ask", "was", "is", "good"), Sample(6, "ask", "still", "still", "good")
    shown = lines_of(page_of(samples=[changed, same])).replace("\n", "|")
    assert "The policy answers 1 of 2 prompts differently from the reference model." in shown
    assert (
        "|Row 5|Prompt|ask|Before (reference)|was|After (policy)|is|Chosen in the data|good|"
        "Row 6|Prompt|ask|Before (reference)|still|After (policy)|still|The answer did not change.|Chosen in the data|good|"
    ) in shown
    without_samples = lines_of(page_of(samples=[]))
    assert "evaluation.samples is 0" in without_samples and "Before (" not in without_samples


def test_report_with_many_samples_folds_the_later_ones():
    page = page_of(samples=[Sample(row, "ask", "was", f"answer {row}.", "good") for row in range(20)])
    folded = page[page.index("<summary>12 more answers</summary>") : page.index("<h2>Margins</h2>")]
    assert [f"answer {row}." in folded for row in range(20)] == [False] * 8 + [True] * 12


def test_report_shows_accuracies_by_length_and_source():
    """The interval of 2 of 3, with z^2 = 3.8415: (2/3 + z^2/6 -+ z sqrt(2/27 + z^2/36)) / (1 + z^2/3) = 0.208 and 0.939."""
    shown = lines_of(page_of()).replace("\n", "|")
    table = "Pairs|Number|Accuracy|95% interval|chosen longer|3|66.7%|20.8% to 93.9%|same length|1|0.0%|0.0% to 79.3%|"
    assert table in shown and "by source" not in shown
    by_source = lines_of(page_of(by_source={"old_set": of_own_prompts(1, 4)})).replace("\n", "|")
    assert "Accuracy by source|Pairs|Number|Accuracy|95% interval|old_set|4|25.0%|4.6% to 69.9%|" in by_source


def test_report_shows_worst_pairs():
    shown = lines_of(page_of(worst=[WorstPair(7, 2.5, -1.0, "ask", "good", "bad")])).replace("\n", "|")
    assert "|Row 7: loss 2.5000, margin -1.0000|Prompt|ask|Chosen|good|Rejected|bad|" in shown


def test_report_colours_tokens_by_sign_and_size_of_their_reward():
    """Nine of ten tokens have rewards up to 0.9, one has 90: the 95th percentile of ten values is between both."""
    chosen = response(("a", 1.0), ("\n", 0.5), ("<b>", -1.0), ("c", None), ("d", 0.0), omitted=4)
    pair = RewardedPair(3, "the end", chosen, response(("e", -0.5)))
    page = page_of(rewards=TokenRewards([pair], 0.25))
    tokens = re.findall(r'<span(?: class="(\w+)")? title="([^"]*)">([^<]*)</span>', page)
    assert tokens == [
        ("p9", "+1.0000", "a"),
        ("p4", "+0.5000", "↵\n"),
        ("n9", "-1.0000", "&lt;b&gt;"),
        ("untrained", "not trained", "c"),
        ("", "+0.0000", "d"),
        ("n4", "-0.5000", "e"),
    ]
    shown = flat(page)
    assert "Row 3: margin +1.0000" in shown and "4 more tokens are not shown." in shown
    assert "Sum +0.5000 over 4 tokens. Strongest: a +1.0000, <b> -1.0000, ↵ +0.5000." in shown
    assert "its implicit reward, beta (0.25) times its log-ratio" in shown
    assert "-1.0000 or less +1.0000 or more" in shown


def widths_in_browser(page: str, folder: Path) -> list[tuple[int, int, int]]:
    """Return the widths of frames, the room in them beside a scroll bar, and the width that the page takes there.

    It is in frames, because a headless window cannot be narrower than 500 px.
    """
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px; height: 800px" srcdoc="{html.escape(page)}"></iframe>'
        for width in (390, 1400)
    )
    script = """onload = () => { document.title = [...document.querySelectorAll("iframe")].map(frame => {
        const document = frame.contentDocument;
        document.querySelectorAll("details").forEach(details => details.open = true);
        const root = document.documentElement;
        return [frame.clientWidth, root.clientWidth, root.scrollWidth].join(":"); }) }"""
    (folder / "frames.html").write_text(f"<!doctype html><meta charset=utf-8>{frames}<script>{script}</script>")
    dump = ["--virtual-time-budget=5000", "--dump-dom", f"--user-data-dir={folder / 'profile'}"]
    command = [chromium(), *FLAGS, *dump, (folder / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    [title] = re.findall(r"<title>(.*?)</title>", done.stdout)
    return [
        (int(frame), int(room), int(taken)) for frame, room, taken in (part.split(":") for part in title.split(","))
    ]


@pytest.mark.system
def test_report_with_long_words_fits_a_phone_and_a_desktop(tmp_path):
    page = page_of(
        model_name=LONG,
        samples=[Sample(1, *[LONG] * 4)],
        worst=[WorstPair(7, 2.5, -1.0, *[LONG] * 3)],
        by_source={LONG: of_own_prompts(1, 4)},
        metrics=metrics_of(**{f"sources/{LONG}/rewards/margins": 1.0}),
        rewards=rewards_of(LONG),
    )
    page = add_release(
        page, ReleaseSummary(LONG, 3, LONG, LONG, is_champion=True, reasons=[LONG], links={LONG: f"https://{LONG}"})
    )
    widths = widths_in_browser(page, tmp_path)
    assert [frame for frame, _, _ in widths] == [390, 1400]
    assert all(taken == room for _, room, taken in widths), widths
