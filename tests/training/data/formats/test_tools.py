"""Conversations with tools and reasoning. Oracles: transformers' own rendering of templates, and rows built by hand."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from training.contract.errors import DataError
from training.data.formats.formats import FORMATS
from training.data.formats.quarantine import Quarantined, QuarantineReason

ROOT = Path(__file__).parents[4]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]


def _call(name: str, arguments: Any, **about: str) -> dict[str, Any]:
    return {**about, "type": "function", "function": {"name": name, "arguments": arguments}}


def _said(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


ASK, BAD = _said("user", "How is the weather in 東京?"), _said("assistant", "I cannot know that.")
CALL = _said("assistant", None, tool_calls=[_call("weather", {"place": "東京", "days": 2})])
ASKED = {"prompt": [ASK], "chosen": [CALL], "rejected": [BAD], "tools": TOOLS}
ANSWERED = {
    "prompt": [
        _said("system", "Be brief."),
        ASK,
        _said("assistant", "", tool_calls=[_call("weather", {"place": "東京"}, id="call00001"), _call("clock", {})]),
        _said("tool", '{"sky": "clear"}', tool_call_id="call00001", name="weather"),
        _said("tool", ""),
    ],
    "chosen": [_said("assistant", "Clear.")],
    "rejected": [_said("assistant", "", tool_calls=[_call("clock", {})])],
    "tools": TOOLS,
}
AS_TEXT = [_call("weather", '{"place": "東京", "days": 2}')]
BARE = [{"name": "weather", "arguments": {"place": "東京", "days": 2}}]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("conversational", ASKED),
        ("conversational", {**ASKED, "tools": json.dumps(TOOLS)}),
        ("conversational", {**ASKED, "tools": [json.dumps(tool) for tool in TOOLS]}),
        ("conversational", {**ASKED, "chosen": [_said("assistant", "", tool_calls=AS_TEXT)]}),
        ("conversational", {**ASKED, "chosen": [{"role": "assistant", "tool_calls": json.dumps(AS_TEXT)}]}),
        ("implicit_prompt", {"chosen": [ASK, CALL], "rejected": [ASK, BAD], "tools": TOOLS}),
        (
            "openai",
            {"input": {"messages": [ASK], "tools": TOOLS}, "preferred_output": [CALL], "non_preferred_output": [BAD]},
        ),
    ],
    ids=[
        "objects",
        "tools as text",
        "each tool as text",
        "arguments as text",
        "calls as text",
        "implicit prompt",
        "openai",
    ],
)
def test_every_spelling_is_the_same_pair(name, row):
    pair = FORMATS[name].convert(copy.deepcopy(row))
    assert (list(pair.prompt), list(pair.rejected), json.loads(pair.tools)) == ([ASK], [BAD], TOOLS)
    [chosen] = pair.chosen
    assert (chosen["content"], json.loads(chosen["tool_calls"])) == ("", CALL["tool_calls"])


@pytest.mark.parametrize("several", [False, True])
def test_calls_and_results_in_sharegpt_are_messages(several):
    """As LLaMA-Factory spells them: a turn of its own, whose text is the call."""
    call = {"name": "weather", "arguments": {"place": "東京", "days": 2}}
    row = {
        "conversations": [
            {"from": "human", "value": ASK["content"]},
            {"from": "function_call", "value": json.dumps([call, call] if several else call)},
            {"from": "tool" if several else "observation", "value": "rain"},
        ],
        "chosen": {"from": "function_call", "value": json.dumps(call)},
        "rejected": {"from": "gpt", "value": BAD["content"]},
        "tools": json.dumps(TOOLS),
    }
    pair = FORMATS["sharegpt"].convert(row)
    ask, earlier, result = pair.prompt
    assert (ask, result, list(pair.rejected)) == (ASK, _said("tool", "rain"), [BAD])
    assert [json.loads(each["tool_calls"]) for each in (earlier, *pair.chosen)] == [[call] * (1 + several), [call]]
    row["chosen"] = {"from": "function_call", "value": "weather(東京)"}
    with pytest.raises(Quarantined, match=r"`chosen\[0\].value` is text that is no JSON"):
        FORMATS["sharegpt"].convert(row)
    row["chosen"] = {"from": "function_call", "value": call}
    with pytest.raises(Quarantined, match=r"`chosen\[0\].value` is dict, expected text"):
        FORMATS["sharegpt"].convert(row)
    row["chosen"] = {"from": "function_call", "value": "{}", "tool_calls": [call]}
    with pytest.raises(Quarantined, match=r"`chosen\[0\]` has `tool_calls`"):
        FORMATS["sharegpt"].convert(row)
    row["chosen"] = {"from": "function_call", "value": ""}
    with pytest.raises(Quarantined, match="`chosen` is empty"):
        FORMATS["sharegpt"].convert(row)


NAMES = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
RESULT, DRY, WET = _said("tool", "rain"), _said("assistant", "It is dry."), _said("assistant", "It is wet.")
TRAJECTORY = {
    "prompt": [ASK],
    "chosen": [CALL, RESULT, WET],
    "rejected": [CALL, RESULT, CALL, RESULT, DRY],
    "tools": TOOLS,
}


def test_an_answer_may_call_tools_and_go_on():
    """In whole conversations it begins after the last question that both have, and what both say then is the prompt's."""
    other = _said("tool", "sun")
    whole = {
        side: [ASK, CALL, result, answer]
        for side, result, answer in (("chosen", RESULT, WET), ("rejected", other, DRY))
    }
    pair = FORMATS["conversational"].convert(TRAJECTORY)
    assert [turn["role"] for turn in pair.rejected] == ["assistant", "tool"] * 2 + ["assistant"] and len(
        pair.chosen
    ) == 3
    asked = {side: [ASK, *TRAJECTORY[side]] for side in ("chosen", "rejected")}
    for name, row in (("implicit_prompt", asked), ("conversational", {"prompt": [ASK], **asked})):
        later = FORMATS[name].convert({**row, "tools": TOOLS})
        assert (list(later.prompt), list(later.chosen)) == ([*pair.prompt, *pair.chosen[:2]], [WET])
        assert list(later.rejected) == list(pair.rejected[2:])
    rollouts = FORMATS["implicit_prompt"].convert(whole)  # the same call, to which the tool answered differently
    assert list(rollouts.prompt) == [ASK]
    assert [json.loads(each[0]["tool_calls"]) for each in (rollouts.chosen, rollouts.rejected)] == [
        CALL["tool_calls"]
    ] * 2
    assert [each[1]["content"] for each in (rollouts.chosen, rollouts.rejected)] == ["rain", "sun"]


def _in(m: str) -> str:
    """A template that writes each message as `m` does, between control tokens."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + m + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


SYSTEM, EMPTY = _said("system", "Be brief."), _said("system", "")
IN_WORDS = {"prompt": [ASK], "chosen": [_said("assistant", "Let me look."), RESULT, WET], "rejected": [DRY]}
LATER = {"prompt": [ASK, *IN_WORDS["chosen"][:2]], "chosen": [WET], "rejected": [DRY]}
LAST_ALONE = "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"


@pytest.mark.shared
@pytest.mark.parametrize(
    ("turn", "whole", "cut", "fault"),
    [
        (
            "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
            {"prompt": [EMPTY, ASK], "chosen": [WET], "rejected": [DRY]},
            {"prompt": [SYSTEM, ASK], "chosen": [WET], "rejected": [DRY]},
            "does not write a message of the system",
        ),
        (
            "{% if not (hidden and m.role == 'system') %}{{ m.content }}{% endif %}",
            {"prompt": [SYSTEM, ASK], "chosen": [WET], "rejected": [DRY]},
            {"prompt": [SYSTEM, ASK], "chosen": [WET], "rejected": [DRY], "chat_template_kwargs": {"hidden": True}},
            "does not write a message of the system",
        ),
        (LAST_ALONE, LATER, IN_WORDS, "does not write a message of the assistant inside {% generation %}"),
    ],
    ids=["without a text", "with arguments of its own", "where the answer begins"],
)
def test_one_pair_says_nothing_of_another_of_the_same_roles(workshop, tiny_chat, tmp_path, turn, whole, cut, fault):
    (tmp_path / "own.jinja").write_text(_in(turn))
    train_on = "assistant_turns" if "generation" in turn else "last_response"
    spec = workshop.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on=train_on)
    for rows in ([whole, cut], [cut, whole]):
        done = workshop.pairs(workshop.rows(rows, format="conversational"), spec)
        assert done.pairs.rows.tolist() == [rows.index(whole)]
        assert done.details["first_left_out"] == f"row {rows.index(cut)}, the template {fault}"


@pytest.mark.shared
def test_answers_that_differ_where_nothing_is_trained_any_more_are_no_pair(workshop, tiny_chat, tmp_path):
    """Cut after the result of the first call: the margin would always be zero."""
    (tmp_path / "own.jinja").write_text(_in(MARKED + "{% else %}{{ m.content }}{% endif %}"))
    look = IN_WORDS["chosen"][0]
    row = {"prompt": [ASK], "chosen": [look, RESULT, WET], "rejected": [look, _said("tool", "sun"), DRY]}
    rules = {"train_on": "assistant_turns", "over_length": "truncate_response"}
    rows = workshop.rows([row])
    whole = workshop.pairs(rows, workshop.tokenizer(tiny_chat, tmp_path / "own.jinja", **rules)).pairs
    said = [whole.sequence(0, side).mask_T.tolist() for side in ("chosen", "rejected")]
    room = min(mask.index(True, mask.index(False, mask.index(True))) for mask in said)
    with pytest.raises(DataError, match=r"responses have the same tokens, .* as far as they are trained"):
        workshop.pairs(rows, workshop.tokenizer(tiny_chat, tmp_path / "own.jinja", **rules, max_length=room))


@pytest.mark.shared
def test_results_that_a_template_marks_as_the_assistants_are_not_trained(workshop, tiny_chat, tmp_path):
    (tmp_path / "own.jinja").write_text(
        NAMES + "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}" + CALLS + "{% endgeneration %}{% endif %}<|im_end|>{% endfor %}"
    )
    spec = workshop.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on="assistant_turns")
    done = workshop.pairs(workshop.rows([{**ASKED, "rejected": [WET]}, TRAJECTORY]), spec)
    assert done.pairs.rows.tolist() == [0] and done.details["left_out"] == 1
    assert done.details["first_left_out"] == "row 1, the template has the result of a tool inside {% generation %}"


@pytest.mark.shared
def test_an_answer_with_results_is_trained_by_turns_alone(workshop, tiny_chat, tmp_path):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + CALLS + "<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}" + "<|im_end|>{% endif %}\n{% endfor %}"
    )
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (tmp_path / "own.jinja").write_text(NAMES + text + prompt)
    stops = {**TRAJECTORY, "chosen": [CALL, _said("tool", "rain<|im_end|>"), WET]}
    asks = _said("assistant", "", tool_calls=[_call("weather", {"place": "<|im_end|>"})])
    stops_too = {**TRAJECTORY, "chosen": [asks, RESULT, WET]}
    rows = workshop.rows([{**ASKED, "rejected": [WET]}, TRAJECTORY, stops, stops_too])
    assert rows.details["counts"]["pairs"] == 4
    by_turns, as_one = (
        workshop.pairs(rows, workshop.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on=train_on))
        for train_on in ("assistant_turns", "last_response")
    )
    assert by_turns.details["reasons"] == {"doubled end of turn": 2} and by_turns.details["left_out"] == 0
    assert "a message in `chosen` holds '<|im_end|>'" in by_turns.details["dropped_examples"][0]["detail"]
    tokens = by_turns.pairs.sequence(1, "rejected")
    trained = AutoTokenizer.from_pretrained(tiny_chat).decode(tokens.ids_T[tokens.mask_T])
    assert trained == "[weather]<|im_end|>" * 2 + "It is dry.<|im_end|>"
    assert as_one.details["reasons"] == {"answer of several messages": 3} and as_one.details["left_out"] == 3
    assert as_one.details["first_left_out"].startswith(
        "row 1, `chosen` has 3 messages, not all of the assistant; set `tok"
    )


def test_calls_and_tools_without_the_outer_object_stay_as_they_are():
    row = {**ASKED, "tools": [WEATHER["function"]], "chosen": [_said("assistant", "Let me see.", tool_calls=BARE)]}
    pair = FORMATS["conversational"].convert(row)
    assert json.loads(pair.tools) == [WEATHER["function"]]
    assert (pair.chosen[0]["content"], json.loads(pair.chosen[0]["tool_calls"])) == ("Let me see.", BARE)


@pytest.mark.parametrize("nothing", [{}, "{}", "", None, "null"])
def test_a_call_without_arguments_is_one_with_none(nothing):
    pair = FORMATS["conversational"].convert({**ASKED, "chosen": [{**CALL, "tool_calls": [_call("clock", nothing)]}]})
    assert json.loads(pair.chosen[0]["tool_calls"])[0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("row", "reason", "place"),
    [
        ({**ASKED, "tools": "[{"}, QuarantineReason.BAD_JSON, "`tools` is text"),
        ({**ASKED, "tools": {"name": "weather"}}, QuarantineReason.WRONG_TYPE, "`tools` is dict"),
        ({**ASKED, "tools": '"weather"'}, QuarantineReason.WRONG_TYPE, "`tools` is str"),
        ({**ASKED, "tools": ["weather"]}, QuarantineReason.BAD_JSON, r"`tools\[0\]` is text that is no JSON"),
        ({**ASKED, "tools": [{"type": "function"}]}, QuarantineReason.MISSING_FIELD, r"`tools\[0\].name`"),
        ({**ASKED, "tools": [{"function": "weather"}]}, QuarantineReason.WRONG_TYPE, r"`tools\[0\].function` is str"),
        ({**ASKED, "tools": [{"name": "a", "default": float("nan")}]}, QuarantineReason.WRONG_TYPE, "what JSON cannot"),
        ({**ASKED, "tools": [{"name": "a", "example": "\ud800"}]}, QuarantineReason.BAD_UNICODE, "lone surrogate"),
        ({**ASKED, "tools": [{"name": "a", "example": "\\\0"}]}, QuarantineReason.NUL, "NUL"),
        ({**ASKED, "functions": [WEATHER]}, QuarantineReason.UNSUPPORTED_FIELD, "`functions`"),
        (
            {**ASKED, "chosen": [{**CALL, "tool_calls": [_call("weather", "{")]}]},
            QuarantineReason.BAD_JSON,
            r"\[0\].arguments`",
        ),
        (
            {**ASKED, "chosen": [{**CALL, "tool_calls": [_call("weather", [1])]}]},
            QuarantineReason.WRONG_TYPE,
            r"\[0\].arguments`",
        ),
        ({**ASKED, "chosen": [{**CALL, "tool_calls": [{"id": "1"}]}]}, QuarantineReason.MISSING_FIELD, "tool_calls"),
        (
            {**ASKED, "chosen": [{**CALL, "tool_calls": [{"name": "weather", "parameters": {}}]}]},
            QuarantineReason.MISSING_FIELD,
            r"\[0\].arguments` is missing",
        ),
        (
            {**ASKED, "chosen": [{**CALL, "tool_calls": [_call("weather", '{"a": 1, "a": 2}')]}]},
            QuarantineReason.DUPLICATE_KEY,
            r"\[0\].arguments`: the key 'a' appears twice",
        ),
        ({**ASKED, "prompt": [{**ASK, "tool_call_id": "1"}]}, QuarantineReason.UNSUPPORTED_FIELD, "`tool_call_id`"),
        (
            {**ASKED, "prompt": [ASK, CALL, _said("tool", "", reasoning="Hm.")]},
            QuarantineReason.UNSUPPORTED_FIELD,
            "`reasoning`",
        ),
        (
            {**ASKED, "chosen": [{**BAD, "function_call": {"name": "a"}}]},
            QuarantineReason.UNSUPPORTED_FIELD,
            "function_call",
        ),
        ({**ASKED, "prompt": [{**ASK, "tool_calls": BARE}]}, QuarantineReason.UNSUPPORTED_FIELD, r"`prompt\[0\]` has"),
        ({**ASKED, "prompt": [{**ASK, "thinking": "Hm."}]}, QuarantineReason.UNSUPPORTED_FIELD, "`thinking`"),
        ({**ASKED, "chosen": [{**BAD, "thinking": 7}]}, QuarantineReason.WRONG_TYPE, "chosen.0..thinking` is int"),
        ({**ASKED, "chosen": [_said("assistant", "", thinking="Hm.")]}, QuarantineReason.EMPTY_RESPONSE, "`chosen`"),
        ({**ASKED, "rejected": [CALL]}, QuarantineReason.IDENTICAL, "same text"),
        ({**ASKED, "rejected": [_said("tool", "clear")]}, QuarantineReason.RESPONSE_ROLE, "from the tool"),
        ({**ASKED, "chosen": [CALL, _said("tool", "clear")]}, QuarantineReason.RESPONSE_ROLE, "from the tool"),
        ({**ASKED, "chosen": [_said("tool", "clear"), BAD]}, QuarantineReason.RESPONSE_ROLE, "from the tool"),
        ({**ASKED, "chosen": [CALL, ASK, BAD]}, QuarantineReason.RESPONSE_ROLE, "from the user"),
        ({**ASKED, "chosen": [CALL, BAD]}, QuarantineReason.WRONG_TYPE, "two messages of the assistant in a row"),
        (
            {**ASKED, "chosen": [_said("assistant", ""), _said("tool", ""), BAD]},
            QuarantineReason.EMPTY_RESPONSE,
            "`chosen`",
        ),
        ({**ASKED, "prompt": [ASK, CALL]}, QuarantineReason.PROMPT_ROLE, "from the assistant"),
        ({**ASKED, "chosen": [_said("assistant", None, tool_calls=[])]}, QuarantineReason.MISSING_FIELD, "content"),
    ],
)
def test_what_cannot_be_rendered_faithfully_is_no_pair(row, reason, place):
    with pytest.raises(Quarantined, match=place) as caught:
        FORMATS["conversational"].convert(row)
    assert caught.value.reason is reason


def test_the_documented_row_is_a_pair():
    text = (ROOT / "docs" / "recipe.md").read_text().partition("## Tools and reasoning")[2]
    row = json.loads(text.partition("```json")[2].partition("```")[0])
    pair = FORMATS["conversational"].convert(row)
    assert "Lima" in pair.chosen[0]["tool_calls"] and "weather" in pair.tools


def test_null_in_an_object_is_absent_and_in_text_is_null():
    """What `datasets` writes as JSON lines has the arguments of all rows in each; a model that wrote null, wrote null."""
    objects = {
        **ASKED,
        "chosen": [{**CALL, "tool_calls": [_call("weather", {"place": "東京", "hour": None, "days": 2})]}],
    }
    text = {**ASKED, "chosen": [{**CALL, "tool_calls": [_call("weather", '{"place": null}')]}]}
    tools = FORMATS["conversational"].convert(
        {**ASKED, "tools": ['{"name": "a", "strict": null}', {"name": "b", "strict": None}]}
    )
    assert json.loads(tools.tools) == [{"name": "a", "strict": None}, {"name": "b"}]
    calls = [FORMATS["conversational"].convert(row).chosen[0]["tool_calls"] for row in (objects, text)]
    assert [json.loads(call)[0]["function"]["arguments"] for call in calls] == [
        {"place": "東京", "days": 2},
        {"place": None},
    ]


def test_text_that_only_looks_like_a_nul_is_kept():
    tools = [{"name": "a", "example": "\\u0000"}]
    assert json.loads(FORMATS["conversational"].convert({**ASKED, "tools": tools}).tools) == tools


def test_tools_and_the_order_of_their_keys_are_part_of_what_rows_are(workshop):
    """A template writes keys in their order, so another order may be other tokens."""
    other_order = [_call("weather", {"days": 2, "place": "東京"})]
    rows = [
        ASKED, {**ASKED, "tools": None}, {**ASKED, "tools": TOOLS[::-1]},
        {**ASKED, "chosen": [{**CALL, "tool_calls": other_order}]}, {**ASKED, "prompt": ANSWERED["prompt"]},
    ]  # fmt: skip
    assert len({workshop.rows([row]).made.fingerprint for row in rows}) == len(rows)
    assert (
        workshop.rows([rows[0]]).made.fingerprint
        == workshop.rows([{**ASKED, "tools": json.dumps(TOOLS)}]).made.fingerprint
    )


def test_a_table_is_the_same_data_though_its_structs_have_the_fields_of_all_rows(workshop, tmp_path):
    """In Parquet every call has the arguments of every other, as null, and every tool all parameters."""
    rows = [ASKED, {**ANSWERED, "rejected": [_said("assistant", "", tool_calls=[_call("clock", {"zone": "UTC"})])]}]
    table = pa.Table.from_pylist(rows)
    assert table["chosen"][1].as_py()[0]["tool_calls"] is None and "place" in str(table.schema.field("tools").type)
    pq.write_table(table, tmp_path / "rows.parquet")
    read = workshop.preferences({"path": str(tmp_path / "rows.parquet")})
    assert read.details["counts"]["pairs"] == 2
    assert read.made.fingerprint == workshop.rows(rows).made.fingerprint


def test_a_map_of_a_table_is_an_object(workshop, tmp_path):
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    said = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    schema = pa.schema([(part, pa.list_(said)) for part in ("prompt", "chosen", "rejected")])
    mapped = {"name": "f", "arguments": [("a", "1"), ("b", "2")]}
    row = {"prompt": [ASK], "chosen": [_said("assistant", None, tool_calls=[mapped])], "rejected": [BAD]}
    pq.write_table(pa.Table.from_pylist([row], schema), tmp_path / "rows.parquet")
    [read] = workshop.preferences({"path": str(tmp_path / "rows.parquet")}).table("preferences.parquet")
    assert json.loads(read["chosen"][0]["tool_calls"]) == [{"name": "f", "arguments": {"a": "1", "b": "2"}}]


def test_arguments_for_the_template_may_be_a_map_or_have_names_of_other_rows(workshop, tmp_path):
    """A struct has the fields of all rows, so `tools` in one row is null in the others."""
    said = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    row = {"prompt": [ASK], "chosen": [WET], "rejected": [DRY]}
    for kind, given in (
        (pa.map_(pa.string(), pa.bool_()), [[("thinking", True)], []]),
        (pa.struct([("thinking", pa.bool_()), ("tools", pa.string())]), [{"thinking": True}, {"tools": "x"}]),
    ):
        schema = pa.schema([*((part, said) for part in row), ("chat_template_kwargs", kind)])
        rows = [{**row, "chat_template_kwargs": each} for each in given]
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet")
        read = workshop.preferences({"path": str(tmp_path / "rows.parquet")})
        assert read.table("preferences.parquet")[0]["chat_template_kwargs"] == '{"thinking": true}'
        assert read.details["reasons"] == ({} if given[1] == [] else {"unsupported field": 1})


@pytest.mark.parametrize("tools", ['[{"name": "f", "\\ud800": 1, "\\ud800": 2}]', None], ids=["in text", "in the row"])
def test_a_key_that_no_file_can_hold_is_told_in_one_that_can(workshop, tools):
    plain = {"prompt": [ASK], "chosen": [_said("assistant", "Because.")], "rejected": [BAD]}
    row = {**plain, "tools": tools} if tools else json.dumps(plain)[:-1] + ', "\\ud800": 1, "\\ud800": 2}'
    [refused] = workshop.rows([plain, row]).table("quarantine.parquet")
    assert refused["reason"] == "duplicate key" and "'\\ud800' appears twice" in refused["detail"]


@pytest.mark.shared
def test_tokens_are_those_of_transformers(workshop, shared_data):
    """The template of Qwen 2.5, which knows tools; what a server gets as arguments in text, a template gets as objects."""
    folder = shared_data / "tokenizers" / "qwen2.5"
    spelled = {**ASKED, "chosen": [{**CALL, "tool_calls": AS_TEXT}], "tools": json.dumps(TOOLS)}
    plain = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}
    done = workshop.pairs(
        workshop.rows([ASKED, ANSWERED, spelled, plain], format="conversational"), workshop.tokenizer(folder)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for index, row in enumerate((ASKED, ANSWERED, ASKED)):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        assert done.pairs.prompt_ids(index) == prompt
        for side in ("chosen", "rejected"):
            whole = tokenizer.apply_chat_template(row["prompt"] + row[side], tools=TOOLS, return_dict=False)
            assert done.pairs.sequence(index, side).ids_T.tolist() == whole
    assert '"arguments": {"place": "東京", "days": 2}}\n</tool_call>' in tokenizer.decode(whole_of(done, 0))


def whole_of(done: Any, index: int) -> list[int]:
    return done.pairs.sequence(index, "chosen").ids_T.tolist()


@pytest.mark.shared
def test_a_template_that_knows_no_tools_is_caught(workshop, tiny_chat, tmp_path):
    """It would train on answers to questions that never mention what is called."""
    text = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    (tmp_path / "plain.jinja").write_text(text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    plain = {"prompt": [ASK], "chosen": [_said("assistant", "Because.")], "rejected": [BAD]}
    rows = [plain, {**plain, "tools": TOOLS}, {**plain, "chosen": [CALL]}]
    done = workshop.pairs(workshop.rows(rows), workshop.tokenizer(tiny_chat, tmp_path / "plain.jinja"))
    assert done.pairs.rows.tolist() == [0]
    assert done.details["reasons"] == {"left out by the template": 2}
    assert done.details["dropped_examples"][0]["detail"] == "the template does not write the tool 'weather'"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = {
    "prompt": [ASK, _said("assistant", "Dry.", reasoning_content="Long ago."), ASK],
    "chosen": [_said("assistant", "Wet.", reasoning_content="It is June.")],
    "rejected": [BAD],
}


@pytest.mark.shared
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_goes_before_its_answer(workshop, tiny_chat, tmp_path, name):
    """Oracle: transformers, which takes the three names for one. Of earlier answers this template leaves it out, as many do."""
    (tmp_path / "thinking.jinja").write_text(THINKING)
    spelled = {**THOUGHT, "chosen": [_said("assistant", "Wet.", **{name: "It is June."})]}
    done = workshop.pairs(workshop.rows([spelled]), workshop.tokenizer(tiny_chat, tmp_path / "thinking.jinja"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    for side in ("chosen", "rejected"):
        turns = THOUGHT["prompt"] + spelled[side]
        whole = tokenizer.apply_chat_template(turns, chat_template=THINKING, return_dict=False)
        assert done.pairs.sequence(0, side).ids_T.tolist() == whole
    assert "<think>It is June.</think>Wet." in tokenizer.decode(done.pairs.response_ids(0))


MARKED = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
BESIDE = {**CALL, "content": "Let me look at the forecast."}
CALLED = {**ASKED, "prompt": [ASK, BESIDE, _said("tool", "rain", name="weather"), ASK]}
TEMPLATES = {
    "no reasoning": ("{{ m.content }}" + CALLS, THOUGHT, "the reasoning before an answer"),
    "no tools": ("{{ m.content }}" + CALLS, ASKED, "the tool 'weather'"),
    "no calls": (NAMES + "{{ m.content }}", ASKED, "a call of 'weather'"),
    "no results": (NAMES + "{% if m.role != 'tool' %}{{ m.content }}{% endif %}" + CALLS, CALLED, "the result of a tool"),
    "calls alone": (
        NAMES + "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [BESIDE]},
        "the text beside a call",
    ),
    "a word like a mark": (
        NAMES + "{{ m.content }}",
        {**ASKED, "prompt": [_said("user", "mark0end mark1end mark2end")]},
        "a call of",
    ),
    "everything": (NAMES + "{{ m.reasoning_content or '' }}{{ m.content }}" + CALLS, ASKED, None),
    "beside earlier calls nothing": (
        NAMES + "{% if m.tool_calls and not loop.last %}" + CALLS + "{% else %}{{ m.content }}" + CALLS + "{% endif %}",
        {**CALLED, "chosen": [BESIDE]},
        None,
    ),
    "ids instead of names": (
        NAMES + "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.id }}]{% endfor %}",
        {**ASKED, "chosen": [_said("assistant", "", tool_calls=[_call("weather", {}, id="functions.weather:0")])]},
        None,
    ),
    "names that it checks": (
        "{% for c in m.tool_calls or [] %}{% if c.function.name not in tools | map(attribute='function.name') %}"
        "{{ raise_exception('unknown') }}{% endif %}{% endfor %}{% if m.role == 'tool' and m.name not in "
        "tools | map(attribute='function.name') %}{{ raise_exception('unknown') }}{% endif %}"
        + NAMES + "{{ m.content }}" + CALLS,
        CALLED,
        None,
    ),
    "results by the ids of their calls": (
        NAMES + "{% if m.role == 'tool' %}{% for c in messages[1].tool_calls %}{% if c.id == m.tool_call_id %}{{ m.content }}"
        "{% endif %}{% endfor %}{% else %}{{ m.content }}[{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}]{% endif %}",
        {
            **ASKED,
            "prompt": [
                ASK,
                _said("assistant", "", tool_calls=[_call("weather", {}, id="functions.weather:0")]),
                _said("tool", "rain", tool_call_id="functions.weather:0"),
                ASK,
            ],
            "chosen": [_said("assistant", "Wet.")],
        },
        None,
    ),
    "ids of nine characters": (
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
        + NAMES + "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [{**BESIDE, "tool_calls": [_call("weather", {}, id="weather_1")]}]},
        "the text beside a call",
    ),
    "blanks": (
        NAMES + "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [{**CALL, "content": "\n", "reasoning_content": " "}]},
        None,
    ),
    "no system message, which is empty": (
        "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
        {"prompt": [_said("system", ""), ASK], "chosen": [WET], "rejected": [DRY]},
        None,
    ),
    "no system message": (
        "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
        {"prompt": [_said("system", "Be brief."), ASK], "chosen": [WET], "rejected": [DRY]},
        "a message of the system",
    ),
    "capitals": ("{{ m.content | upper }}", {"prompt": [ASK], "chosen": [WET], "rejected": [DRY]}, None),
    "answers after a tag": (
        "{{ m.content.split('</think>')[-1] }}",
        {"prompt": [ASK], "chosen": [_said("assistant", "<think>It is June.</think>Wet.")], "rejected": [DRY]},
        "all that the assistant says: '<think>It is June",
    ),
    "answers with other blanks": (
        "{{ m.content.split() | join('  ') }}",
        {"prompt": [ASK], "chosen": [_said("assistant", " It\n\nis  wet.")], "rejected": [DRY]},
        None,
    ),
    "names that it knows": (
        "{% if tools and tools[0].function.name != 'weather' %}{{ raise_exception('unknown') }}{% endif %}"
        "{{ m.content }}" + CALLS,
        ASKED,
        None,
    ),
    "calls outside of what is trained": (
        NAMES + MARKED + CALLS + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [BESIDE]},
        "a call of 'weather' inside {% generation %}",
    ),
    "calls inside of what is trained": (
        NAMES + MARKED.replace("{{ m.content }}", "{{ m.content }}" + CALLS) + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [BESIDE]},
        None,
    ),
}  # fmt: skip


@pytest.mark.shared
@pytest.mark.parametrize(("turn", "row", "missing"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_what_a_template_leaves_out_is_told(workshop, tiny_chat, tmp_path, turn, row, missing):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + turn + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + (NAMES if NAMES in turn else "") + "{% endif %}"
    )
    train_on = "assistant_turns" if "generation" in turn else "last_response"
    plain = {"prompt": "Why?", "chosen": [_said("assistant", "Because.")], "rejected": [BAD]}
    spec = workshop.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on=train_on)
    done = workshop.pairs(workshop.rows([plain, row]), spec)
    told = [drop["detail"] for drop in done.details["dropped_examples"]]
    assert done.details["left_out"] == len(told) == (missing is not None)
    assert all(detail.startswith(f"the template does not write {missing}") for detail in told)


@pytest.mark.shared
def test_nesting_that_nobody_can_read_again_is_told(workshop, shared_data):
    """Whether a text is too deep depends on how deep the reader stands: the row was accepted where there was more room."""
    deep = [f'[{{"name": "a", "p": {"[" * depth}{"]" * depth}}}]' for depth in range(100, 1000, 18)]
    rows: list[Any] = [{**ASKED, "tools": text} for text in deep]
    rows += [json.dumps({**ASKED, "tools": "?"}).replace('"?"', text) for text in deep]
    done = workshop.rows([ASKED, *rows])
    made = workshop.pairs(done, workshop.tokenizer(shared_data / "tokenizers" / "qwen2.5"))
    assert len(made.pairs) + made.details["counts"]["dropped"] == done.details["counts"]["pairs"] > 1
    assert done.details["counts"]["rows_read"] == 101


ADDRESSED = "{% for m in messages %}{{ to or 'all' }}: {{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.shared
def test_arguments_of_a_row_go_to_the_template_before_those_of_all(workshop, tiny_chat, tmp_path):
    (tmp_path / "addressed.jinja").write_text(ADDRESSED)
    plain = {"prompt": [ASK], "chosen": [_said("assistant", "Because.")], "rejected": [BAD]}
    rows = [{**plain, "chat_template_kwargs": {"to": "Bo", "unused": None}}, plain]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = workshop.preferences({"path": str(tmp_path / "rows.parquet")})
    assert [row.get("chat_template_kwargs") for row in read.table("preferences.parquet")] == ['{"to": "Bo"}', None]
    assert (
        read.made.fingerprint == workshop.rows(rows).made.fingerprint != workshop.rows([plain, plain]).made.fingerprint
    )
    spec = workshop.tokenizer(tiny_chat, tmp_path / "addressed.jinja", template_kwargs={"to": "you"})
    done, tokenizer = workshop.pairs(read, spec), AutoTokenizer.from_pretrained(tiny_chat)
    for index, to in enumerate(("Bo", "you")):
        whole = tokenizer.apply_chat_template(
            [ASK, *plain["chosen"]], chat_template=ADDRESSED, return_dict=False, to=to
        )
        assert whole_of(done, index) == whole


def test_a_prompt_is_on_one_side_whatever_its_calls_are_called(workshop):
    """A template may leave out the ids of calls and earlier reasoning: then these prompts are the same tokens."""
    rows = [
        {
            **THOUGHT,
            "prompt": [
                _said("user", f"Question {n // 2}"),
                _said("assistant", "", tool_calls=[_call("clock", {}, id=f"call{n}")], thinking=f"Thought {n}"),
                _said("tool", "12:00", tool_call_id=f"call{n}"),
            ],
        }
        for n in range(80)
    ]  # fmt: skip
    splits = [row["split"] for row in workshop.rows(rows, fraction=0.5).table("preferences.parquet")]
    assert splits[::2] == splits[1::2] and set(splits) == {"train", "validation"}


def test_one_reasoning_is_not_another(workshop):
    other = {**THOUGHT, "chosen": [_said("assistant", "Wet.", reasoning_content="It is July.")]}
    same = {**THOUGHT, "chosen": [_said("assistant", "Wet.", thinking="It is June.")]}
    prints = [workshop.rows([row]).made.fingerprint for row in (THOUGHT, other, same)]
    assert prints[0] == prints[2] != prints[1]
