"""Each format with rows made by hand: the pair in a row, or the reason for quarantine."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from training.contract.config.data_source import FieldName
from training.contract.errors import DataError
from training.contract.files.local_files import DataFile
from training.data.formats import ranked_responses
from training.data.formats.formats import FORMATS
from training.data.formats.quarantine import Quarantined, QuarantineReason
from training.data.reading.format_detection import detect
from training.data.reading.readers import read_records

ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No idea."}
PAIR = ([ASK], [GOOD], [BAD])

SAME_PAIR: dict[str, list[dict[str, Any]]] = {
    "conversational": [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "tools": "[]", "images": [], "chat_template_kwargs": {},
         "score_chosen": 9.0},
        {"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}],
         "chosen": [{**GOOD, "tool_calls": None}], "rejected": BAD},
    ],
    "implicit_prompt": [{"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}],
    "strings": [
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."},
        {"system": "", "question": "Why?", "chosen": "Because.", "rejected": "No idea."},
        {"prompt": "Why?", "question": "As it was asked at first", "chosen": "Because.", "rejected": "No idea."},
        {"prompt": None, "question": "Why?", "chosen": "Because.", "rejected": "No idea."},
        {"prompt": [ASK], "chosen": "Because.", "rejected": "No idea."},
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea.", "response_1": "Yes.", "response_2": "So."},
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "Why?"}], "chosen": {"from": "gpt", "value": "Because."},
         "rejected": {"from": "gpt", "value": "No idea."}},
        {"conversations": [{"from": "user", "value": "Why?"}], "chosen": [{"from": "assistant", "value": "Because."}],
         "rejected": [{"from": "assistant", "value": "No idea."}]},
    ],
    "hh": [
        {"chosen": "\n\nHuman: Why?\n\nAssistant: Because.", "rejected": "\n\nHuman: Why?\n\nAssistant: No idea."},
        {"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " Because.", "rejected": " No idea."},
        *({"prompt": prompt, "chosen": "\n\nHuman: Why?\n\nAssistant: Because.",
           "rejected": "\n\nHuman: Why?\n\nAssistant: No idea."} for prompt in ("Why?", "\n\nHuman: Why?\n\nAssistant:")),
    ],
    "alpaca": [
        {"instruction": "Why?", "input": "", "chosen": "Because.", "rejected": "No idea.", "output": "x"},
        {"instruction": "Why?", "input": None, "chosen": "Because.", "rejected": "No idea."},
    ],
    "openai": [{"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}],
    "messages": [
        {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
        {"messages": [ASK], "chosen": [GOOD], "rejected": [BAD], "prompt": None, "question": "As it was asked at first"},
        {"messages": [ASK], "chosen": "Because.", "rejected": "No idea."},
        {"messages": [ASK, GOOD], "chosen": [GOOD], "rejected": BAD},
    ],
    "ms_swift": [
        {"messages": [ASK, GOOD], "rejected_response": "No idea."},
        {"messages": [ASK, GOOD], "rejected_response": "No idea.", "rejected_messages": None, "images": []},
        {"messages": [ASK, GOOD], "rejected_response": [BAD]},
        {"messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]},
    ],
    "comparison": [
        {"instruction": "Why?", "input": "", "response1": "No idea.", "response2": "Because.",
         "annotator1": 2, "annotator2": 1, "annotator3": 2},
        {"prompt": "Why?", "response1": "Because.", "response2": "No idea.", "label": "1"},
        {"prompt": None, "instruction": "Why?", "response1": "Because.", "response2": "No idea.", "label": "1"},
        {"prompt": "Why?", "response1": "Because.", "response2": "No idea.", "winner": "response1"},
        {"prompt": "Why?", "response_0": "Because.", "response_1": "No idea.", "better_response_id": 0},
        {"prompt": "Why?", "response_a": "No idea.", "response_b": "Because.", "winner": "model_b"},
        {"prompt": "Why?", "response1": "Because.", "response2": "No idea.", "preference": 1.0},
        {"prompt": [ASK], "response1": "No idea.", "response2": "Because.", "overall_preference": 2},
        {"prompt": "Why?", "response_1": "Because.", "response_2": "No idea.", "preference_strength": -1.0},
        {"prompt": "Why?", "response_a": [GOOD], "response_b": [BAD], "winner": "a"},
        {"question": "Why?", "response1": "Because.", "response2": "No idea.", "label": "1.0"},
        {"instruction": "Why?", "response1": [GOOD], "response2": [BAD], "label": 1},
        {"prompt": "Why?", "response_0": None, "response_1": "Because.", "response_2": "No idea.", "label": 1},
        {"response_0": [ASK, BAD], "response_1": [ASK, GOOD], "label": 1},
        {"conversation_a": [ASK, BAD], "conversation_b": [ASK, GOOD], "winner": "model_b"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in SAME_PAIR.items() for row in rows])
def test_convert_rows_of_every_format_returns_the_same_pair(name, row):
    pair = FORMATS[name].convert(row)
    assert (list(pair.prompt), list(pair.chosen), list(pair.rejected)) == PAIR
    assert detect([row], "here") == name


class RecordingRow(dict[str, Any]):
    """A row that records the fields that are read by name."""

    def __init__(self, row: dict[str, Any]):
        super().__init__(row)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_field_names_of_columns_are_all_fields_that_formats_read():
    """A row has only one label, so the module's list adds the other names. Annotators are named by number."""
    read = {*ranked_responses.LABELS, *ranked_responses.SIGNED_LABELS}
    for name, rows in SAME_PAIR.items():
        for row in map(RecordingRow, rows):
            FORMATS[name].convert(row)
            read |= row.names
    assert {name for name in read if not name.startswith("annotator")} == {*get_args(FieldName)}


def test_formats_are_all_tested():
    assert set(FORMATS) == set(SAME_PAIR)


@pytest.mark.parametrize(
    ("name", "row", "prompt"),
    [
        ("alpaca", {"instruction": "Fix it.", "input": "freind", "chosen": "a", "rejected": "b"}, ["Fix it.\n\nfreind"]),
        ("alpaca", {"instruction": "C", "history": [["A", "B"]], "chosen": "a", "rejected": "b"}, ["A", "B", "C"]),
        ("strings", {"prompt": "C", "history": [["A", "B"]], "chosen": "a", "rejected": "b"}, ["A", "B", "C"]),
        ("comparison", {"instruction": "C", "history": [["A", "B"]], "response1": "a", "response2": "b", "label": 1},
         ["A", "B", "C"]),
        ("conversational", {"prompt": None, "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ["Why?"]),
        ("conversational", {"system": "S ", "prompt": [{"role": "system", "content": "S"}, ASK], "chosen": [GOOD],
         "rejected": [BAD]}, ["S", "Why?"]),
        ("strings", {"prompt": "C", "input": "d", "chosen": "a", "rejected": "b"}, ["C"]),
        ("strings", {"system": "Be kind.", "prompt": "C", "chosen": "a", "rejected": "b"}, ["Be kind.", "C"]),
        ("conversational", {"system": "S", "prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, ["S", "Why?"]),
        ("implicit_prompt", {"system": "S", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ["S", "Why?"]),
        ("sharegpt", {
            "system": "S", "conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "C"}],
            "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
         ["S", "C"]),
        ("ms_swift", {"messages": [ASK, BAD, ASK, GOOD], "rejected_response": "No.", "system": "S"},
         ["S", "Why?", "No idea.", "Why?"]),
        ("ms_swift", {"messages": [ASK, BAD, ASK, GOOD], "rejected_messages": [ASK, BAD, ASK, BAD]},
         ["Why?", "No idea.", "Why?"]),
        ("messages", {"messages": [ASK, BAD, ASK], "chosen": GOOD, "rejected": BAD}, ["Why?", "No idea.", "Why?"]),
        ("messages", {"messages": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ["Why?"]),
        ("messages", {"messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ["Why?"]),
        ("conversational", {"prompt": [{"role": "system", "content": ""}, ASK], "chosen": [GOOD], "rejected": [BAD]},
         ["", "Why?"]),
        ("hh", {
            "chosen": "\n\nHuman:  A\t\n\nAssistant: B\n\nand more\n\nHuman: C\n\nAssistant: a",
            "rejected": "\n\nHuman:  A\t\n\nAssistant: B\n\nand more\n\nHuman: C\n\nAssistant: b"},
         [" A\t", "B\n\nand more", "C"]),
    ],
)  # fmt: skip
def test_convert_joins_all_parts_of_the_prompt(name, row, prompt):
    assert [turn["content"] for turn in FORMATS[name].convert(row).prompt] == prompt


def _conversation(prompt=(ASK,), chosen=(GOOD,), rejected=(BAD,)):
    return {"prompt": list(prompt), "chosen": list(chosen), "rejected": list(rejected)}


def _message(role, content):
    return {"role": role, "content": content}


UNUSABLE = [
    ("conversational", {"prompt": [ASK], "chosen": [GOOD]}, QuarantineReason.MISSING_FIELD),
    ("conversational", {"prompt": [ASK], "chosen": [GOOD], "rejected": None}, QuarantineReason.MISSING_FIELD),
    ("conversational", _conversation(chosen=[{"role": "assistant"}]), QuarantineReason.MISSING_FIELD),
    ("conversational", {"prompt": 7, "chosen": [GOOD], "rejected": [BAD]}, QuarantineReason.WRONG_TYPE),
    ("conversational", _conversation(chosen=["Because."]), QuarantineReason.WRONG_TYPE),
    ("conversational", _conversation(chosen=[_message("assistant", 7)]), QuarantineReason.WRONG_TYPE),
    ("conversational", _conversation(chosen=[GOOD, GOOD]), QuarantineReason.WRONG_TYPE),
    ("conversational", _conversation(prompt=[]), QuarantineReason.EMPTY_PROMPT),
    ("conversational", _conversation(prompt=[_message("user", " \n")]), QuarantineReason.EMPTY_PROMPT),
    ("conversational", _conversation(chosen=[]), QuarantineReason.EMPTY_RESPONSE),
    ("conversational", _conversation(rejected=[_message("assistant", "")]), QuarantineReason.EMPTY_RESPONSE),
    ("conversational", _conversation(rejected=[GOOD]), QuarantineReason.IDENTICAL),
    ("conversational", _conversation(rejected=[ASK]), QuarantineReason.RESPONSE_ROLE),
    ("conversational", _conversation(prompt=[ASK, GOOD]), QuarantineReason.PROMPT_ROLE),
    ("conversational", _conversation(prompt=[_message("system", "x")]), QuarantineReason.PROMPT_ROLE),
    ("conversational", _conversation(prompt=[_message("developer", "x")]), QuarantineReason.PROMPT_ROLE),
    ("conversational", _conversation(prompt=[_message("robot", "x")]), QuarantineReason.UNKNOWN_ROLE),
    (
        "conversational",
        _conversation(prompt=[_message("user", [{"type": "image_url"}])]),
        QuarantineReason.UNSUPPORTED_FIELD,
    ),
    ("conversational", _conversation(prompt=[_message("user", "a\0b")]), QuarantineReason.NUL),
    ("conversational", _conversation(prompt=[_message("user", "a\ud800b")]), QuarantineReason.BAD_UNICODE),
    ("strings", {"prompt": "Why?", "chosen": "x" * 5_000_000, "rejected": "No."}, QuarantineReason.ENORMOUS),
    (
        "conversational",
        {"prompt": "Other", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        QuarantineReason.PROMPTS_DIFFER,
    ),
    (
        "implicit_prompt",
        {"chosen": [ASK, GOOD], "rejected": [_message("user", "Who?"), BAD]},
        QuarantineReason.PROMPTS_DIFFER,
    ),
    ("implicit_prompt", {"chosen": [ASK, GOOD], "rejected": [ASK, GOOD, ASK, BAD]}, QuarantineReason.PROMPTS_DIFFER),
    (
        "implicit_prompt",
        {"chosen": [ASK, GOOD, ASK, BAD], "rejected": [ASK, BAD, ASK, GOOD]},
        QuarantineReason.PROMPTS_DIFFER,
    ),
    ("implicit_prompt", {"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, QuarantineReason.IDENTICAL),
    ("implicit_prompt", {"chosen": [GOOD], "rejected": [BAD]}, QuarantineReason.EMPTY_PROMPT),
    ("hh", {"chosen": "Human: hi", "rejected": "\n\nHuman: hi\n\nAssistant: a"}, QuarantineReason.BAD_TRANSCRIPT),
    (
        "hh",
        {"chosen": "\n\nHuman: A\n\nAssistant: a", "rejected": "\n\nHuman: B\n\nAssistant: b"},
        QuarantineReason.PROMPTS_DIFFER,
    ),
    (
        "hh",
        {"chosen": "\n\nHuman: A\n\nAssistant:", "rejected": "\n\nHuman: A\n\nAssistant: b"},
        QuarantineReason.EMPTY_RESPONSE,
    ),
    (
        "openai",
        {"input": [ASK], "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        QuarantineReason.WRONG_TYPE,
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "robot", "value": "x"}], "chosen": {}, "rejected": {}},
        QuarantineReason.UNKNOWN_ROLE,
    ),
    (
        "openai",
        SAME_PAIR["openai"][0] | {"input": {"messages": [ASK], "functions": [{}]}},
        QuarantineReason.UNSUPPORTED_FIELD,
    ),
    ("implicit_prompt", SAME_PAIR["implicit_prompt"][0] | {"functions": "[{}]"}, QuarantineReason.UNSUPPORTED_FIELD),
    ("conversational", _conversation() | {"chat_template_kwargs": {"tools": []}}, QuarantineReason.UNSUPPORTED_FIELD),
    (
        "conversational",
        _conversation() | {"chat_template_kwargs": {"continue_final_message": True}},
        QuarantineReason.UNSUPPORTED_FIELD,
    ),
    ("conversational", _conversation() | {"chat_template_kwargs": [True]}, QuarantineReason.WRONG_TYPE),
    ("conversational", _conversation() | {"chat_template_kwargs": "{thinking}"}, QuarantineReason.BAD_JSON),
    ("alpaca", {"instruction": "A", "history": ["B"], "chosen": "a", "rejected": "b"}, QuarantineReason.WRONG_TYPE),
    ("alpaca", {"instruction": "A", "history": 3, "chosen": "a", "rejected": "b"}, QuarantineReason.WRONG_TYPE),
    ("alpaca", {"input": "A", "chosen": "a", "rejected": "b"}, QuarantineReason.MISSING_FIELD),
    (
        "strings",
        {"prompt": "A", "chosen": "a", "rejected": "b", "audio": {"path": "a.wav"}},
        QuarantineReason.UNSUPPORTED_FIELD,
    ),
    (
        "implicit_prompt",
        {"chosen": [ASK, GOOD | {"function_calls": "f()"}], "rejected": [ASK, BAD]},
        QuarantineReason.UNSUPPORTED_FIELD,
    ),
    ("hh", {"prompt": "\n\nHuman: Why?", "chosen": " a", "rejected": " b"}, QuarantineReason.PROMPTS_DIFFER),
    ("messages", {"messages": [ASK, BAD], "chosen": GOOD, "rejected": BAD}, QuarantineReason.PROMPT_ROLE),
    (
        "messages",
        {"messages": [ASK, BAD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        QuarantineReason.PROMPTS_DIFFER,
    ),
    ("messages", {"messages": [GOOD], "chosen": GOOD, "rejected": BAD}, QuarantineReason.EMPTY_PROMPT),
    ("messages", {"messages": [ASK], "chosen": GOOD, "rejected": ASK}, QuarantineReason.RESPONSE_ROLE),
    ("messages", {"messages": "Why?", "chosen": GOOD, "rejected": BAD}, QuarantineReason.WRONG_TYPE),
    ("ms_swift", {"messages": [ASK], "rejected_response": "No idea."}, QuarantineReason.RESPONSE_ROLE),
    ("ms_swift", {"messages": [], "rejected_response": "No idea."}, QuarantineReason.EMPTY_PROMPT),
    ("ms_swift", {"messages": [GOOD], "rejected_response": "No idea."}, QuarantineReason.EMPTY_PROMPT),
    ("ms_swift", {"messages": [ASK, GOOD], "rejected_response": "Because."}, QuarantineReason.IDENTICAL),
    ("ms_swift", {"messages": [ASK, GOOD], "rejected_response": ""}, QuarantineReason.EMPTY_RESPONSE),
    ("ms_swift", {"messages": [ASK, GOOD], "rejected_response": None}, QuarantineReason.MISSING_FIELD),
    (
        "ms_swift",
        {"messages": [ASK, GOOD], "rejected_messages": [_message("user", "Who?"), BAD]},
        QuarantineReason.PROMPTS_DIFFER,
    ),
    (
        "ms_swift",
        {"messages": [ASK, GOOD], "rejected_response": "No.", "rejected_messages": [ASK, BAD]},
        QuarantineReason.UNSUPPORTED_FIELD,
    ),
]


@pytest.mark.parametrize(("name", "row", "reason"), UNUSABLE)
def test_convert_unusable_row_raises_the_reason(name, row, reason):
    with pytest.raises(Quarantined) as caught:
        FORMATS[name].convert(row)
    assert caught.value.reason is reason
    assert caught.value.detail


def test_convert_text_with_a_nul_names_its_position():
    """By hand: `a` is at 0, `é` at 1, and the NUL at 2."""
    with pytest.raises(Quarantined, match=r"`chosen` .* at position 2;") as caught:
        FORMATS["strings"].convert({"prompt": "Why?", "chosen": "aé\0b", "rejected": "No."})
    assert caught.value.reason is QuarantineReason.NUL


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"annotator1": 1, "annotator2": 2, "annotator3": 0}, QuarantineReason.TIE),  # one vote each
        ({"annotator1": 0, "annotator2": 0, "annotator3": 1}, QuarantineReason.TIE),  # a majority for tie
        ({"annotator1": 1, "annotator2": 2}, QuarantineReason.TIE),  # half is not a majority
        ({"winner": "tie"}, QuarantineReason.TIE),
        ({"winner": "both_bad"}, QuarantineReason.TIE),
        ({"overall_preference": 10**400}, QuarantineReason.UNKNOWN_LABEL),
        ({"overall_preference": 0}, QuarantineReason.TIE),
        ({"overall_preference": "much better"}, QuarantineReason.UNKNOWN_LABEL),
        ({"overall_preference": True}, QuarantineReason.UNKNOWN_LABEL),
        ({"overall_preference": float("nan")}, QuarantineReason.UNKNOWN_LABEL),
        ({"label": 3}, QuarantineReason.UNKNOWN_LABEL),
        ({"label": None}, QuarantineReason.MISSING_FIELD),
        ({}, QuarantineReason.MISSING_FIELD),
    ],
)
def test_convert_comparison_without_a_winner_raises_the_reason(labels, reason):
    with pytest.raises(Quarantined) as caught:
        FORMATS["comparison"].convert({"instruction": "A", "response1": "a", "response2": "b", **labels})
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("implicit_prompt", {"messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
        ("conversational", {"messages": [ASK, GOOD], "prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}),
        ("conversational", {"messages": [ASK, GOOD], "prompt": "Why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
        ("strings", {"messages": [ASK, GOOD], "prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}),
        ("alpaca", {"messages": [ASK], "instruction": "Why?", "chosen": "Because.", "rejected": "No idea."}),
        ("hh", {**SAME_PAIR["hh"][0], "messages": [ASK]}),
        ("sharegpt", {**SAME_PAIR["sharegpt"][0], "messages": [ASK]}),
        ("strings", {**SAME_PAIR["strings"][0], "messages": [ASK, GOOD], "rejected_response": "No."}),
        ("comparison", {**SAME_PAIR["comparison"][1], "messages": [ASK, GOOD], "rejected_response": "No."}),
    ],
)
def test_detect_rows_with_redundant_messages_uses_the_other_fields(name, row):
    """UltraFeedback repeats the chosen conversation in `messages`."""
    assert detect([row], "here") == name
    pair = FORMATS[name].convert(row)
    assert (list(pair.prompt), list(pair.chosen), list(pair.rejected)) == PAIR


def test_detect_text_with_speakers_inside_is_not_a_transcript():
    assert (
        detect([{"prompt": "Write a play.", "chosen": "Act 1\n\nHuman: Hi.", "rejected": "No."}], "here") == "strings"
    )


@pytest.mark.parametrize("chosen", ["response_2", "model_b", 2, "B"])
def test_detect_chosen_that_names_a_response_is_a_comparison(chosen):
    row = {
        "prompt": "Why?",
        "response_1": "No idea.",
        "response_2": "Because.",
        "chosen": chosen,
        "rejected": "response_1",
    }
    assert detect([row], "here") == "comparison"
    with pytest.raises(Quarantined, match=r"annotator1\.\., label") as caught:
        FORMATS["comparison"].convert(row)
    assert caught.value.reason is QuarantineReason.MISSING_FIELD


def test_detect_returns_the_format_of_most_rows_or_lists_all_formats():
    strings = SAME_PAIR["strings"][0]
    for odd in ({"a": 1}, *(rows[0] for rows in SAME_PAIR.values())):
        assert detect([odd, strings, strings], "here") == "strings"
    with pytest.raises(DataError, match=r"\[unknown-format\]") as caught:
        detect([{"question_text": "x", "answer": "y"}], "data.jsonl")
    for value in ("data.jsonl", "question_text (text), answer (text)", *FORMATS, "`columns: {"):
        assert value in str(caught.value)


HELLO = "\n\nHuman: Hello.\n\nAssistant:"
BROKEN_AMONG_OTHERS = [
    ("sharegpt", SAME_PAIR["sharegpt"][0], SAME_PAIR["sharegpt"][0] | {"conversations": None}),
    (
        "hh",
        {"prompt": HELLO, "chosen": "Hi.", "rejected": "No."},
        {"prompt": "Hi.", "chosen": "Hi.", "rejected": "No."},
    ),
]


@pytest.mark.parametrize(("name", "row", "broken"), BROKEN_AMONG_OTHERS, ids=[name for name, *_ in BROKEN_AMONG_OTHERS])
def test_detect_a_minority_of_rows_without_the_distinctive_field_does_not_decide(name, row, broken):
    """A wider format fits all of these rows. It would read the speakers' names in transcripts as content."""
    assert detect([broken], "here") != name == detect([row], "here")
    assert detect([broken, row, row], "here") == name
    assert detect([broken, broken, row], "here") != name


@pytest.mark.shared
@pytest.mark.parametrize(("file", "format"), [("ms-swift.jsonl", "ms_swift"), ("axolotl.jsonl", "messages")])
def test_detect_rows_of_other_tools_needs_no_configuration(shared_data: Path, file, format):
    """By hand: each tool has four rows, one per hall."""
    path = shared_data.parent / "cases" / "07-messages-and-rejected" / file
    rows = [record.value for record in read_records(DataFile(name=file, path=path))]
    assert detect(rows, file) == format
    for hall, row in enumerate(rows):
        pair = FORMATS[format].convert(row)
        assert [turn["content"] for turn in (*pair.prompt, *pair.chosen, *pair.rejected)] == [
            f"What is in hall {hall}?", f"Hall {hall} has the café.", f"I do not know {hall}.",
        ]  # fmt: skip
    assert len(rows) == 4


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "format"),
    [
        ("conversational-explicit-prompt.jsonl", "conversational"),
        ("conversational-implicit-prompt.jsonl", "implicit_prompt"),
    ],
)
def test_convert_published_rows_in_two_layouts_returns_the_same_pairs(shared_data: Path, file, format):
    """The files hold the same 300 rows in two layouts. The oracle is the first file, which is in our schema."""
    schemas = shared_data / "schemas"
    pairs = [json.loads(line) for line in (schemas / "conversational-explicit-prompt.jsonl").open("rb")]
    rows = [json.loads(line) for line in (schemas / file).open("rb")]
    assert detect(rows[:32], file) == format
    for row, expected in zip(rows, pairs, strict=True):
        pair = FORMATS[format].convert(row)
        assert [list(pair.prompt), list(pair.chosen), list(pair.rejected)] == list(expected.values())
