"""Rows that no format fits: the sentence about them. Oracle: what a person sees in rows as other tools publish them."""

from typing import Any

import pytest

from tests.training.data.formats.test_formats import SAME_PAIR
from training.contract.errors import DataError
from training.data.formats.format_mismatch import closest_format
from training.data.formats.formats import FORMATS
from training.data.reading.format_detection import detect

ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No idea."}


def _told(*rows: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        detect(rows, "data.jsonl")
    return str(caught.value)


LABEL, RATING = (
    "one answer, in `{}`, and a label that says whether it is good, in `{}`",
    "one answer, in `{}`, and a rating of it, in `{}`",
)
NOT_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Why?", "completion": "Because.", "label": True}, LABEL.format("completion", "label")),  # TRL
    ({"prompt": [ASK], "completion": [GOOD], "label": False}, LABEL.format("completion", "label")),
    ({"messages": [ASK, GOOD], "label": True}, LABEL.format("messages", "label")),  # ms-swift
    ({"instruction": "Why?", "output": "Because.", "kto_tag": True}, LABEL.format("output", "kto_tag")),  # LLaMA-Factory
    ({"prompt": "Why?", "completion": "Because.", "label": "True"}, LABEL.format("completion", "label")),  # CSV
    ({"prompt": "Why?", "response": "Because.", "label": 1.0}, LABEL.format("response", "label")),
    ({"prompt": "Why?", "responses": ["Because.", "No idea."], "ranks": [1, 2]}, "a list of answers, in `responses`"),
    ({"prompt": "Why?", "said": ["Because.", "No idea."], "points": [0.5, 0.1]}, "a list of answers, in `said`"),
    ({"prompt": "Why?", "answers": [{"answer": "Because.", "rank": 1}, {"answer": "No idea.", "rank": 2}]},
     "a list of answers, in `answers`"),  # Nectar
    ({"instruction": "Why?", "completions": [{"response": "Because.", "overall_score": 7.5}]},
     "a list of answers, in `completions`"),  # UltraFeedback
    ({"q": "Why?", "given": [{"text": "Because.", "score": 3}, {"text": "No idea.", "score": 1}]},
     "a list of answers, in `given`"),
    ({"prompt": "Why?", "candidates": [[GOOD], [BAD]]}, "a list of answers, in `candidates`"),
    ({"prompt": "Why?", "chosen": "Because.", "rejected": ["No idea.", "Who knows?"]}, "a list of answers, in `rejected`"),
    ({"prompt": "Why?", "response": "Because.", "helpfulness": 4, "verbosity": 2}, RATING.format("response", "helpfulness")),
    ({"prompt": "Why?", "completion": "Because.", "score": "0.75"}, RATING.format("completion", "score")),
    ({"messages": [ASK, GOOD], "rating": 5}, RATING.format("messages", "rating")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words"), NOT_PAIRS)
def test_detect_rows_that_are_not_pairs_says_so_in_one_sentence(row, words):
    assert _told(row, row, {"note": "odd"}) == (
        f"data.jsonl: these rows are not pairs, since each has {words}: make pairs of a better and a worse answer to the same "
        "prompt, and write each pair as one row of `prompt`, `chosen` and `rejected`"
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "Because.", "rejected_completion": "No idea.", "score": 0.5},
        {"prompt": "Why?", "response": "Because.", "worse": "No idea.", "label": True},
        {"prompt": "Why?", "answer": "Because.", "response": "No idea.", "score": 1},
        {"prompt": "Why?", "completion": "Because.", "label": "science"},
        {"prompt": "Why?", "completion": "Because.", "id": 7},
        {"question_text": "Why?", "tags": ["a", "b"]},
        {"messages": [ASK, GOOD]},
    ],
)
def test_detect_rows_that_may_be_pairs_under_other_names_names_columns(row):
    told = _told(row)
    assert "are not pairs" not in told and "`columns: {" in told


def test_detect_few_rows_that_are_not_pairs_do_not_speak_for_the_others():
    assert "are not pairs" not in _told(NOT_PAIRS[0][0], {"prompt": "Why?"}, {"prompt": "Who?"})


CLOSEST: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt": "Why?", "chosen": "Because."}, "strings", "lack `rejected`", "rejected"),
    ({"question": "Why?", "chosen": "a", "rejected": None}, "strings", "lack `rejected`", "rejected"),
    ({"chosen": "Because.", "rejected": "No idea."}, "strings", "lack `prompt` or `question`", "prompt"),
    ({"prompt": "Why?", "answer_a": "a", "answer_b": "b"}, "strings", "lack `chosen`, and lack `rejected`", "chosen"),
    ({"prompt": [ASK], "chosen": [GOOD]}, "conversational", "lack `rejected`", "rejected"),
    ({"chosen": [ASK, GOOD]}, "implicit_prompt", "lack `rejected`", "rejected"),
    ({"instruction": "Why?", "chosen": "Because."}, "alpaca", "lack `rejected`", "rejected"),
    ({"messages": [ASK, GOOD]}, "ms_swift", "lack `rejected_response` or `rejected_messages`", "rejected_response"),
    ({"messages": [ASK], "chosen": GOOD}, "messages", "lack `rejected`", "rejected"),
    ({"conversations": [], "chosen": {}}, "sharegpt", "lack `rejected`", "rejected"),
    ({"preferred_output": [GOOD], "input": {}}, "openai", "lack `non_preferred_output`", "non_preferred_output"),
    ({"prompt": "Why?", "response_a": "a", "label": 1}, "comparison", "lack `response_b`", "response_b"),
    ({"response1": "a", "response2": "b", "label": 1}, "comparison", "lack `prompt` or `question` or `instruction`", "prompt"),
    ({"prompt": 7, "chosen": "a", "rejected": "b"}, "strings", "have int in `prompt`, expected text or messages", "prompt"),
    ({"prompt": "Why?", "chosen": "a", "rejected": 0.5}, "strings", "have float in `rejected`, expected text", "rejected"),
    ({"prompt": "Why?", "chosen": "a", "rejected": [BAD]}, "strings", "have a list in `rejected`, expected text", "rejected"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "name", "words", "field"), CLOSEST)
def test_detect_unknown_rows_names_the_closest_format_first(row, name, words, field):
    told = _told(row, row, {"note": "odd"})
    start = f"data.jsonl: the first rows are closest to `{name}`, but {words}; none of the preference formats fits them. Their "
    assert told.startswith(start)
    assert f"`columns: {{{field}: my_column}}`" in told and all(f"{each} (" in told for each in FORMATS)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in SAME_PAIR.items() for row in rows])
def test_closest_format_of_rows_that_a_format_fits_asks_nothing_of_that_format(name, row):
    """So what is asked of each format is not more than what it takes."""
    closest = closest_format([row])
    assert closest is None or closest.format != name or name == "comparison"


@pytest.mark.parametrize("field", ["messages", "rejected_messages"])
def test_detect_messages_as_text_are_refused_only_if_no_format_fits(field):
    listed = '[{"role": "user", "content": "Why?"}]'
    told = _told({"messages": [ASK, GOOD], field: listed})
    assert f"`{field}` holds lists written as text" in told
    assert detect([{"prompt": "Why?", "chosen": "a", "rejected": "b", field: listed}], "here") == "strings"
