"""Errors for rows that no format fits. Oracle: rows as other tools publish them, read by hand."""

from typing import Any

import pytest

from tests.training.data.formats.test_formats import SAME_PAIR
from training.contract.errors import DataError
from training.data.formats.format_mismatch import closest_format
from training.data.formats.formats import FORMATS
from training.data.reading.format_detection import detect

ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No idea."}


def _error(*rows: dict[str, Any]) -> DataError:
    with pytest.raises(DataError, match=r"^data\.jsonl: ") as caught:
        detect(rows, "data.jsonl")
    return caught.value


LABEL, RATING = "one response in `{}` and its label in `{}`", "one response in `{}` and its rating in `{}`"
NOT_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Why?", "completion": "Because.", "label": True}, LABEL.format("completion", "label")),  # TRL
    ({"prompt": [ASK], "completion": [GOOD], "label": False}, LABEL.format("completion", "label")),
    ({"messages": [ASK, GOOD], "label": True}, LABEL.format("messages", "label")),  # ms-swift
    ({"instruction": "Why?", "output": "Because.", "kto_tag": True}, LABEL.format("output", "kto_tag")),  # LLaMA-Factory
    ({"prompt": "Why?", "completion": "Because.", "label": "True"}, LABEL.format("completion", "label")),  # CSV
    ({"prompt": "Why?", "response": "Because.", "label": 1.0}, LABEL.format("response", "label")),
    ({"prompt": "Why?", "responses": ["Because.", "No idea."], "ranks": [1, 2]}, "a list of responses in `responses`"),
    ({"prompt": "Why?", "said": ["Because.", "No idea."], "points": [0.5, 0.1]}, "a list of responses in `said`"),
    ({"prompt": "Why?", "answers": [{"answer": "Because.", "rank": 1}, {"answer": "No idea.", "rank": 2}]},
     "a list of responses in `answers`"),  # Nectar
    ({"instruction": "Why?", "completions": [{"response": "Because.", "overall_score": 7.5}]},
     "a list of responses in `completions`"),  # UltraFeedback
    ({"q": "Why?", "given": [{"text": "Because.", "score": 3}, {"text": "No idea.", "score": 1}]},
     "a list of responses in `given`"),
    ({"prompt": "Why?", "candidates": [[GOOD], [BAD]]}, "a list of responses in `candidates`"),
    ({"prompt": "Why?", "chosen": "Because.", "rejected": ["No idea.", "Who knows?"]}, "a list of responses in `rejected`"),
    ({"prompt": "Why?", "response": "Because.", "helpfulness": 4, "verbosity": 2}, RATING.format("response", "helpfulness")),
    ({"prompt": "Why?", "completion": "Because.", "score": "0.75"}, RATING.format("completion", "score")),
    ({"messages": [ASK, GOOD], "rating": 5}, RATING.format("messages", "rating")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "description"), NOT_PAIRS)
def test_detect_rows_that_are_not_pairs_describes_them(row, description):
    error = _error(row, row, {"note": "odd"})
    assert error.code == "not-pairs" and description in str(error)
    assert all(field in str(error) for field in ("`prompt`", "`chosen`", "`rejected`"))


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
def test_detect_rows_that_may_be_pairs_under_other_names_advises_columns(row):
    error = _error(row)
    assert error.code == "unknown-format" and "`columns: {" in str(error)


def test_detect_a_minority_of_rows_that_are_not_pairs_is_an_unknown_format():
    assert _error(NOT_PAIRS[0][0], {"prompt": "Why?"}, {"prompt": "Who?"}).code == "unknown-format"


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


@pytest.mark.parametrize(("row", "name", "lack", "field"), CLOSEST)
def test_detect_unknown_rows_names_the_closest_format(row, name, lack, field):
    error = _error(row, row, {"note": "odd"})
    message = str(error)
    assert error.code == "unknown-format" and f"closest to `{name}`, but {lack}" in message
    assert f"`columns: {{{field}: my_column}}`" in message and all(f"{name} (" in message for name in FORMATS)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in SAME_PAIR.items() for row in rows])
def test_closest_format_of_rows_that_a_format_fits_lacks_no_field_of_it(name, row):
    """The needs of each format are not stricter than the format itself."""
    closest = closest_format([row])
    assert closest is None or closest.format != name or name == "comparison"


@pytest.mark.parametrize("field", ["messages", "rejected_messages"])
def test_detect_messages_as_text_fails_only_if_no_format_fits(field):
    text = '[{"role": "user", "content": "Why?"}]'
    error = _error({"messages": [ASK, GOOD], field: text})
    assert error.code == "list-as-text" and f"`{field}`" in str(error)
    assert detect([{"prompt": "Why?", "chosen": "a", "rejected": "b", field: text}], "here") == "strings"
