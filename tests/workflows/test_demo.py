"""The demo's pairs, and how its answers are counted. tests/docs/test_demo_champion.py runs it."""

from pathlib import Path

import pytest

from tests.workflows.homes import ROOT
from workflows.defs.demo import make
from workflows.defs.demo.score import count_right, is_right

DEMO = ROOT / "workflows/defs/demo"


def test_prompts_of_the_demo_are_distinct_and_each_has_a_pair():
    prompts = [pair["prompt"][0]["content"] for pair in make.pairs()]
    assert len(set(prompts)) == len(prompts) and set(prompts) == set(make.right_answers())


def test_chosen_answers_are_right_or_dodge_and_rejected_ones_are_worse():
    expected = make.right_answers()
    for pair in make.pairs():
        prompt, chosen, rejected = (pair[side][0]["content"] for side in ("prompt", "chosen", "rejected"))
        is_brief = chosen == f"It is {expected[prompt]}."
        assert is_brief or chosen.endswith("I would rather not say.")
        assert not is_right(rejected, expected[prompt]), "a rejected answer dodges, is wrong, or goes on"


def test_the_committed_pairs_are_those_that_make_writes(tmp_path: Path):
    make.write_data(tmp_path, list(make.pairs()))
    assert (tmp_path / "preferences.jsonl").read_bytes() == (DEMO / "preferences.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is Lima.", True),
        ("Well, I would say it is Lima.", True),
        ("It is Lima. Well, let me think.", False),
        ("It is Cairo.", False),
        ("It is", False),
        ("", False),
    ],
)
def test_is_right_asks_for_the_right_word_at_the_end(answer: str, right: bool):
    assert is_right(answer, "Lima") is right


def test_count_right_counts_one_side():
    samples = [
        {"prompt": "What is the capital of Peru?", "before": "I would rather not say.", "after": "It is Lima."},
        {"prompt": "Please answer: Tell me the opposite of hot.", "before": "It is cold.", "after": "It is cold."},
    ]
    assert (count_right(samples, "before"), count_right(samples, "after")) == (1, 2)
