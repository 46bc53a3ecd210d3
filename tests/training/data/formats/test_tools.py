"""Conversations with tools and reasoning. Oracles: transformers' rendering of templates, and rows made by hand."""

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


def _call(name: str, arguments: Any, **fields: str) -> dict[str, Any]:
    return {**fields, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


ASK, BAD = _message("user", "How is the weather in 東京?"), _message("assistant", "I cannot know that.")
CALL = _message("assistant", None, tool_calls=[_call("weather", {"place": "東京", "days": 2})])
ASKED = {"prompt": [ASK], "chosen": [CALL], "rejected": [BAD], "tools": TOOLS}
ANSWERED = {
    "prompt": [
        _message("system", "Be brief."),
        ASK,
        _message("assistant", "", tool_calls=[_call("weather", {"place": "東京"}, id="call00001"), _call("clock", {})]),
        _message("tool", '{"sky": "clear"}', tool_call_id="call00001", name="weather"),
        _message("tool", ""),
    ],
    "chosen": [_message("assistant", "Clear.")],
    "rejected": [_message("assistant", "", tool_calls=[_call("clock", {})])],
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
        ("conversational", {**ASKED, "chosen": [_message("assistant", "", tool_calls=AS_TEXT)]}),
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
def test_convert_every_layout_of_tools_and_calls_returns_the_same_pair(name, row):
    pair = FORMATS[name].convert(copy.deepcopy(row))
    assert (list(pair.prompt), list(pair.rejected), json.loads(pair.tools)) == ([ASK], [BAD], TOOLS)
    [chosen] = pair.chosen
    assert (chosen["content"], json.loads(chosen["tool_calls"])) == ("", CALL["tool_calls"])


@pytest.mark.parametrize("several", [False, True])
def test_convert_sharegpt_turns_with_calls_and_results_returns_messages(several):
    """As in LLaMA-Factory: the text of a turn of `function_call` is the call."""
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
    assert (ask, result, list(pair.rejected)) == (ASK, _message("tool", "rain"), [BAD])
    assert [json.loads(turn["tool_calls"]) for turn in (earlier, *pair.chosen)] == [[call] * (1 + several), [call]]
    for message, reason, path in (
        ({"value": "weather(東京)"}, QuarantineReason.BAD_JSON, r"`chosen\[0\].value`"),
        ({"value": call}, QuarantineReason.WRONG_TYPE, r"`chosen\[0\].value` is dict"),
        ({"value": "{}", "tool_calls": [call]}, QuarantineReason.UNSUPPORTED_FIELD, r"`chosen\[0\]` has `tool_calls`"),
        ({"value": ""}, QuarantineReason.EMPTY_RESPONSE, "`chosen`"),
    ):
        with pytest.raises(Quarantined, match=path) as caught:
            FORMATS["sharegpt"].convert({**row, "chosen": {"from": "function_call", **message}})
        assert caught.value.reason is reason


NAMES = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
RESULT, DRY, WET = _message("tool", "rain"), _message("assistant", "It is dry."), _message("assistant", "It is wet.")
TRAJECTORY = {
    "prompt": [ASK],
    "chosen": [CALL, RESULT, WET],
    "rejected": [CALL, RESULT, CALL, RESULT, DRY],
    "tools": TOOLS,
}


def test_convert_response_with_calls_and_results_splits_it_from_the_prompt():
    """In conversations the response begins after the last shared question. Shared messages after it go to the prompt."""
    other = _message("tool", "sun")
    conversations = {
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
    rollouts = FORMATS["implicit_prompt"].convert(conversations)  # the same call with two results
    sides = (rollouts.chosen, rollouts.rejected)
    assert list(rollouts.prompt) == [ASK]
    assert [json.loads(turns[0]["tool_calls"]) for turns in sides] == [CALL["tool_calls"]] * 2
    assert [turns[1]["content"] for turns in sides] == ["rain", "sun"]


def _in(m: str) -> str:
    """Return a template that writes each message as `m`, between control tokens."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + m + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


SYSTEM, EMPTY = _message("system", "Be brief."), _message("system", "")
IN_WORDS = {"prompt": [ASK], "chosen": [_message("assistant", "Let me look."), RESULT, WET], "rejected": [DRY]}
LATER = {"prompt": [ASK, *IN_WORDS["chosen"][:2]], "chosen": [WET], "rejected": [DRY]}
LAST_ALONE = "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"


@pytest.mark.shared
@pytest.mark.parametrize(
    ("turn", "complete", "incomplete", "problem"),
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
    ids=["empty text", "template arguments", "start of the response"],
)
def test_pairs_of_the_same_roles_are_checked_separately(
    job_runner, tiny_chat, tmp_path, turn, complete, incomplete, problem
):
    (tmp_path / "own.jinja").write_text(_in(turn))
    train_on = "assistant_turns" if "generation" in turn else "last_response"
    spec = job_runner.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on=train_on)
    for rows in ([complete, incomplete], [incomplete, complete]):
        done = job_runner.pairs(job_runner.rows(rows, format="conversational"), spec)
        assert done.pairs.rows.tolist() == [rows.index(complete)]
        assert done.details.first_left_out == f"row {rows.index(incomplete)}, the template {problem}"


@pytest.mark.shared
def test_pairs_truncated_to_the_same_trained_tokens_are_dropped(job_runner, tiny_chat, tmp_path):
    """The responses are cut after the result of the first call, so the margin would always be zero."""
    (tmp_path / "own.jinja").write_text(_in(MARKED + "{% else %}{{ m.content }}{% endif %}"))
    look = IN_WORDS["chosen"][0]
    row = {"prompt": [ASK], "chosen": [look, RESULT, WET], "rejected": [look, _message("tool", "sun"), DRY]}
    rules = {"train_on": "assistant_turns", "over_length": "truncate_response"}
    rows = job_runner.rows([row])
    complete = job_runner.pairs(rows, job_runner.tokenizer(tiny_chat, tmp_path / "own.jinja", **rules)).pairs
    masks = [complete.sequence(0, side).mask_T.tolist() for side in ("chosen", "rejected")]
    room = min(mask.index(True, mask.index(False, mask.index(True))) for mask in masks)
    with pytest.raises(DataError, match=r"responses have the same tokens.*\[all-pairs-dropped\]"):
        job_runner.pairs(rows, job_runner.tokenizer(tiny_chat, tmp_path / "own.jinja", **rules, max_length=room))


@pytest.mark.shared
def test_pairs_with_tool_results_inside_generation_are_dropped(job_runner, tiny_chat, tmp_path):
    (tmp_path / "own.jinja").write_text(
        NAMES + "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}" + CALLS + "{% endgeneration %}{% endif %}<|im_end|>{% endfor %}"
    )
    spec = job_runner.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on="assistant_turns")
    done = job_runner.pairs(job_runner.rows([{**ASKED, "rejected": [WET]}, TRAJECTORY]), spec)
    assert done.pairs.rows.tolist() == [0] and done.details.left_out == 1
    assert done.details.first_left_out == "row 1, the template has the result of a tool inside {% generation %}"


@pytest.mark.shared
def test_pairs_with_tool_results_need_assistant_turns(job_runner, tiny_chat, tmp_path):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + CALLS + "<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}" + "<|im_end|>{% endif %}\n{% endfor %}"
    )
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (tmp_path / "own.jinja").write_text(NAMES + text + prompt)
    stops = {**TRAJECTORY, "chosen": [CALL, _message("tool", "rain<|im_end|>"), WET]}
    asks = _message("assistant", "", tool_calls=[_call("weather", {"place": "<|im_end|>"})])
    stops_too = {**TRAJECTORY, "chosen": [asks, RESULT, WET]}
    rows = job_runner.rows([{**ASKED, "rejected": [WET]}, TRAJECTORY, stops, stops_too])
    assert rows.details.counts.pairs == 4
    by_turns, as_one = (
        job_runner.pairs(rows, job_runner.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on=train_on))
        for train_on in ("assistant_turns", "last_response")
    )
    assert by_turns.details.reasons == {"doubled end of turn": 2} and by_turns.details.left_out == 0
    detail = by_turns.details.dropped_examples[0].detail
    assert "`chosen`" in detail and "'<|im_end|>'" in detail
    tokens = by_turns.pairs.sequence(1, "rejected")
    trained = AutoTokenizer.from_pretrained(tiny_chat).decode(tokens.ids_T[tokens.mask_T])
    assert trained == "[weather]<|im_end|>" * 2 + "It is dry.<|im_end|>"
    assert as_one.details.reasons == {"answer of several messages": 3} and as_one.details.left_out == 3
    first = as_one.details.first_left_out
    assert first.startswith("row 1, `chosen` has 3 messages") and "`tokenization.train_on: assistant_turns`" in first


def test_convert_calls_and_tools_without_the_outer_object_keeps_them():
    row = {**ASKED, "tools": [WEATHER["function"]], "chosen": [_message("assistant", "Let me see.", tool_calls=BARE)]}
    pair = FORMATS["conversational"].convert(row)
    assert json.loads(pair.tools) == [WEATHER["function"]]
    assert (pair.chosen[0]["content"], json.loads(pair.chosen[0]["tool_calls"])) == ("Let me see.", BARE)


@pytest.mark.parametrize("nothing", [{}, "{}", "", None, "null"])
def test_convert_call_with_empty_arguments_returns_an_empty_object(nothing):
    pair = FORMATS["conversational"].convert({**ASKED, "chosen": [{**CALL, "tool_calls": [_call("clock", nothing)]}]})
    assert json.loads(pair.chosen[0]["tool_calls"])[0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({**ASKED, "tools": "[{"}, QuarantineReason.BAD_JSON, "`tools` is text"),
        ({**ASKED, "tools": {"name": "weather"}}, QuarantineReason.WRONG_TYPE, "`tools` is dict"),
        ({**ASKED, "tools": '"weather"'}, QuarantineReason.WRONG_TYPE, "`tools` is str"),
        ({**ASKED, "tools": ["weather"]}, QuarantineReason.BAD_JSON, r"`tools\[0\]`"),
        ({**ASKED, "tools": [{"type": "function"}]}, QuarantineReason.MISSING_FIELD, r"`tools\[0\].name`"),
        ({**ASKED, "tools": [{"function": "weather"}]}, QuarantineReason.WRONG_TYPE, r"`tools\[0\].function` is str"),
        ({**ASKED, "tools": [{"name": "a", "default": float("nan")}]}, QuarantineReason.WRONG_TYPE, "`tools`"),
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
            {**ASKED, "prompt": [ASK, CALL, _message("tool", "", reasoning="Hm.")]},
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
        ({**ASKED, "chosen": [_message("assistant", "", thinking="Hm.")]}, QuarantineReason.EMPTY_RESPONSE, "`chosen`"),
        ({**ASKED, "rejected": [CALL]}, QuarantineReason.IDENTICAL, "responses"),
        ({**ASKED, "rejected": [_message("tool", "clear")]}, QuarantineReason.RESPONSE_ROLE, "from the tool"),
        ({**ASKED, "chosen": [CALL, _message("tool", "clear")]}, QuarantineReason.RESPONSE_ROLE, "from the tool"),
        ({**ASKED, "chosen": [_message("tool", "clear"), BAD]}, QuarantineReason.RESPONSE_ROLE, "from the tool"),
        ({**ASKED, "chosen": [CALL, ASK, BAD]}, QuarantineReason.RESPONSE_ROLE, "from the user"),
        ({**ASKED, "chosen": [CALL, BAD]}, QuarantineReason.WRONG_TYPE, "two messages of the assistant in a row"),
        (
            {**ASKED, "chosen": [_message("assistant", ""), _message("tool", ""), BAD]},
            QuarantineReason.EMPTY_RESPONSE,
            "`chosen`",
        ),
        ({**ASKED, "prompt": [ASK, CALL]}, QuarantineReason.PROMPT_ROLE, "from the assistant"),
        ({**ASKED, "chosen": [_message("assistant", None, tool_calls=[])]}, QuarantineReason.MISSING_FIELD, "content"),
    ],
)
def test_convert_unusable_tools_calls_or_reasoning_raises_the_reason(row, reason, detail):
    with pytest.raises(Quarantined, match=detail) as caught:
        FORMATS["conversational"].convert(row)
    assert caught.value.reason is reason


def test_convert_documented_row_returns_a_pair():
    text = (ROOT / "docs" / "reference" / "data-formats.md").read_text().partition("## Tools and reasoning")[2]
    row = json.loads(text.partition("```json")[2].partition("```")[0])
    pair = FORMATS["conversational"].convert(row)
    assert "Lima" in pair.chosen[0]["tool_calls"] and "weather" in pair.tools


def test_convert_null_is_removed_from_objects_and_kept_in_text():
    """JSON lines of `datasets` have the arguments of all rows in each row. Text comes from a model, which may write null."""
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


def test_convert_text_that_looks_like_an_escaped_nul_keeps_it():
    tools = [{"name": "a", "example": "\\u0000"}]
    assert json.loads(FORMATS["conversational"].convert({**ASKED, "tools": tools}).tools) == tools


def test_fingerprint_covers_tools_and_the_order_of_their_keys(job_runner):
    """A template writes keys in their order, so another order may give other tokens."""
    other_order = [_call("weather", {"days": 2, "place": "東京"})]
    rows = [
        ASKED, {**ASKED, "tools": None}, {**ASKED, "tools": TOOLS[::-1]},
        {**ASKED, "chosen": [{**CALL, "tool_calls": other_order}]}, {**ASKED, "prompt": ANSWERED["prompt"]},
    ]  # fmt: skip
    assert len({job_runner.rows([row]).made.fingerprint for row in rows}) == len(rows)
    assert (
        job_runner.rows([rows[0]]).made.fingerprint
        == job_runner.rows([{**ASKED, "tools": json.dumps(TOOLS)}]).made.fingerprint
    )


def test_preferences_of_a_table_have_the_fingerprint_of_its_json_lines(job_runner, tmp_path):
    """In Parquet, each call has the arguments of all calls, as null, and each tool has all parameters."""
    rows = [ASKED, {**ANSWERED, "rejected": [_message("assistant", "", tool_calls=[_call("clock", {"zone": "UTC"})])]}]
    table = pa.Table.from_pylist(rows)
    assert table["chosen"][1].as_py()[0]["tool_calls"] is None and "place" in str(table.schema.field("tools").type)
    pq.write_table(table, tmp_path / "rows.parquet")
    read = job_runner.preferences({"path": str(tmp_path / "rows.parquet")})
    assert read.details.counts.pairs == 2
    assert read.made.fingerprint == job_runner.rows(rows).made.fingerprint


def test_preferences_read_a_map_of_a_table_as_an_object(job_runner, tmp_path):
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    schema = pa.schema([(part, pa.list_(turn)) for part in ("prompt", "chosen", "rejected")])
    mapped = {"name": "f", "arguments": [("a", "1"), ("b", "2")]}
    row = {"prompt": [ASK], "chosen": [_message("assistant", None, tool_calls=[mapped])], "rejected": [BAD]}
    pq.write_table(pa.Table.from_pylist([row], schema), tmp_path / "rows.parquet")
    [read] = job_runner.preferences({"path": str(tmp_path / "rows.parquet")}).table("preferences.parquet")
    assert json.loads(read["chosen"][0]["tool_calls"]) == [{"name": "f", "arguments": {"a": "1", "b": "2"}}]


def test_preferences_read_template_arguments_of_a_map_or_struct(job_runner, tmp_path):
    """A struct has the fields of all rows, so `tools` in one row is null in the others."""
    turns = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    row = {"prompt": [ASK], "chosen": [WET], "rejected": [DRY]}
    for kind, values in (
        (pa.map_(pa.string(), pa.bool_()), [[("thinking", True)], []]),
        (pa.struct([("thinking", pa.bool_()), ("tools", pa.string())]), [{"thinking": True}, {"tools": "x"}]),
    ):
        schema = pa.schema([*((part, turns) for part in row), ("chat_template_kwargs", kind)])
        rows = [{**row, "chat_template_kwargs": value} for value in values]
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet")
        read = job_runner.preferences({"path": str(tmp_path / "rows.parquet")})
        assert read.table("preferences.parquet")[0]["chat_template_kwargs"] == '{"thinking": true}'
        assert read.details.reasons == ({} if values[1] == [] else {"unsupported field": 1})


@pytest.mark.parametrize("tools", ['[{"name": "f", "\\ud800": 1, "\\ud800": 2}]', None], ids=["in text", "in the row"])
def test_quarantine_of_a_key_with_a_lone_surrogate_escapes_it(job_runner, tools):
    plain = {"prompt": [ASK], "chosen": [_message("assistant", "Because.")], "rejected": [BAD]}
    row = {**plain, "tools": tools} if tools else json.dumps(plain)[:-1] + ', "\\ud800": 1, "\\ud800": 2}'
    [quarantined] = job_runner.rows([plain, row]).table("quarantine.parquet")
    assert quarantined["reason"] == "duplicate key" and "'\\ud800'" in quarantined["detail"]


@pytest.mark.shared
@pytest.mark.slow
def test_pairs_with_tools_have_the_tokens_of_transformers(job_runner, shared_data):
    """The template of Qwen 2.5 knows tools. Servers parse arguments in text, so templates get objects."""
    folder = shared_data / "tokenizers" / "qwen2.5"
    spelled = {**ASKED, "chosen": [{**CALL, "tool_calls": AS_TEXT}], "tools": json.dumps(TOOLS)}
    plain = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}
    done = job_runner.pairs(
        job_runner.rows([ASKED, ANSWERED, spelled, plain], format="conversational"), job_runner.tokenizer(folder)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for index, row in enumerate((ASKED, ANSWERED, ASKED)):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        assert done.pairs.prompt_ids(index) == prompt
        for side in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template(row["prompt"] + row[side], tools=TOOLS, return_dict=False)
            assert done.pairs.sequence(index, side).ids_T.tolist() == ids
    assert '"arguments": {"place": "東京", "days": 2}}\n</tool_call>' in tokenizer.decode(_chosen_ids(done, 0))


def _chosen_ids(done: Any, index: int) -> list[int]:
    return done.pairs.sequence(index, "chosen").ids_T.tolist()


@pytest.mark.shared
def test_pairs_with_tools_that_the_template_does_not_write_are_dropped(job_runner, tiny_chat, tmp_path):
    """The model would learn to call tools that the prompt does not mention."""
    text = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    (tmp_path / "plain.jinja").write_text(text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    plain = {"prompt": [ASK], "chosen": [_message("assistant", "Because.")], "rejected": [BAD]}
    rows = [plain, {**plain, "tools": TOOLS}, {**plain, "chosen": [CALL]}]
    done = job_runner.pairs(job_runner.rows(rows), job_runner.tokenizer(tiny_chat, tmp_path / "plain.jinja"))
    assert done.pairs.rows.tolist() == [0]
    assert done.details.reasons == {"left out by the template": 2}
    assert done.details.dropped_examples[0].detail == "the template does not write the tool 'weather'"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = {
    "prompt": [ASK, _message("assistant", "Dry.", reasoning_content="Long ago."), ASK],
    "chosen": [_message("assistant", "Wet.", reasoning_content="It is June.")],
    "rejected": [BAD],
}


@pytest.mark.shared
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_pairs_with_reasoning_under_any_name_have_the_tokens_of_transformers(job_runner, tiny_chat, tmp_path, name):
    """transformers treats the three names alike. This template, like many, drops the reasoning of earlier responses."""
    (tmp_path / "thinking.jinja").write_text(THINKING)
    row = {**THOUGHT, "chosen": [_message("assistant", "Wet.", **{name: "It is June."})]}
    done = job_runner.pairs(job_runner.rows([row]), job_runner.tokenizer(tiny_chat, tmp_path / "thinking.jinja"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    for side in ("chosen", "rejected"):
        turns = THOUGHT["prompt"] + row[side]
        ids = tokenizer.apply_chat_template(turns, chat_template=THINKING, return_dict=False)
        assert done.pairs.sequence(0, side).ids_T.tolist() == ids
    assert "<think>It is June.</think>Wet." in tokenizer.decode(done.pairs.response_ids(0))


MARKED = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
BESIDE = {**CALL, "content": "Let me look at the forecast."}
CALLED = {**ASKED, "prompt": [ASK, BESIDE, _message("tool", "rain", name="weather"), ASK]}
TEMPLATES = {
    "no reasoning": ("{{ m.content }}" + CALLS, THOUGHT, "the reasoning before a response"),
    "no tools": ("{{ m.content }}" + CALLS, ASKED, "the tool 'weather'"),
    "no calls": (NAMES + "{{ m.content }}", ASKED, "a call of 'weather'"),
    "no results": (NAMES + "{% if m.role != 'tool' %}{{ m.content }}{% endif %}" + CALLS, CALLED, "the result of a tool"),
    "calls only": (
        NAMES + "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [BESIDE]},
        "the text beside a call",
    ),
    "a word like a mark": (
        NAMES + "{{ m.content }}",
        {**ASKED, "prompt": [_message("user", "mark0end mark1end mark2end")]},
        "a call of",
    ),
    "everything": (NAMES + "{{ m.reasoning_content or '' }}{{ m.content }}" + CALLS, ASKED, None),
    "no text beside earlier calls": (
        NAMES + "{% if m.tool_calls and not loop.last %}" + CALLS + "{% else %}{{ m.content }}" + CALLS + "{% endif %}",
        {**CALLED, "chosen": [BESIDE]},
        None,
    ),
    "ids instead of names": (
        NAMES + "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.id }}]{% endfor %}",
        {**ASKED, "chosen": [_message("assistant", "", tool_calls=[_call("weather", {}, id="functions.weather:0")])]},
        None,
    ),
    "checked names": (
        "{% for c in m.tool_calls or [] %}{% if c.function.name not in tools | map(attribute='function.name') %}"
        "{{ raise_exception('unknown') }}{% endif %}{% endfor %}{% if m.role == 'tool' and m.name not in "
        "tools | map(attribute='function.name') %}{{ raise_exception('unknown') }}{% endif %}"
        + NAMES + "{{ m.content }}" + CALLS,
        CALLED,
        None,
    ),
    "results by ids": (
        NAMES + "{% if m.role == 'tool' %}{% for c in messages[1].tool_calls %}{% if c.id == m.tool_call_id %}{{ m.content }}"
        "{% endif %}{% endfor %}{% else %}{{ m.content }}[{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}]{% endif %}",
        {
            **ASKED,
            "prompt": [
                ASK,
                _message("assistant", "", tool_calls=[_call("weather", {}, id="functions.weather:0")]),
                _message("tool", "rain", tool_call_id="functions.weather:0"),
                ASK,
            ],
            "chosen": [_message("assistant", "Wet.")],
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
    "no empty system message": (
        "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
        {"prompt": [_message("system", ""), ASK], "chosen": [WET], "rejected": [DRY]},
        None,
    ),
    "no system message": (
        "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
        {"prompt": [_message("system", "Be brief."), ASK], "chosen": [WET], "rejected": [DRY]},
        "a message of the system",
    ),
    "capitals": ("{{ m.content | upper }}", {"prompt": [ASK], "chosen": [WET], "rejected": [DRY]}, None),
    "responses after a tag": (
        "{{ m.content.split('</think>')[-1] }}",
        {"prompt": [ASK], "chosen": [_message("assistant", "<think>It is June.</think>Wet.")], "rejected": [DRY]},
        "all of the assistant's text: '<think>It is June",
    ),
    "responses with other blanks": (
        "{{ m.content.split() | join('  ') }}",
        {"prompt": [ASK], "chosen": [_message("assistant", " It\n\nis  wet.")], "rejected": [DRY]},
        None,
    ),
    "known names": (
        "{% if tools and tools[0].function.name != 'weather' %}{{ raise_exception('unknown') }}{% endif %}"
        "{{ m.content }}" + CALLS,
        ASKED,
        None,
    ),
    "calls outside generation": (
        NAMES + MARKED + CALLS + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [BESIDE]},
        "a call of 'weather' inside {% generation %}",
    ),
    "calls inside generation": (
        NAMES + MARKED.replace("{{ m.content }}", "{{ m.content }}" + CALLS) + "{% else %}{{ m.content }}{% endif %}",
        {**ASKED, "chosen": [BESIDE]},
        None,
    ),
}  # fmt: skip


@pytest.mark.shared
@pytest.mark.parametrize(("turn", "row", "missing"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_pairs_that_the_template_writes_incompletely_are_dropped(job_runner, tiny_chat, tmp_path, turn, row, missing):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + turn + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + (NAMES if NAMES in turn else "") + "{% endif %}"
    )
    train_on = "assistant_turns" if "generation" in turn else "last_response"
    plain = {"prompt": "Why?", "chosen": [_message("assistant", "Because.")], "rejected": [BAD]}
    spec = job_runner.tokenizer(tiny_chat, tmp_path / "own.jinja", train_on=train_on)
    done = job_runner.pairs(job_runner.rows([plain, row]), spec)
    details = [drop.detail for drop in done.details.dropped_examples]
    assert done.details.left_out == len(details) == (missing is not None)
    assert all(detail.startswith(f"the template does not write {missing}") for detail in details)


@pytest.mark.shared
@pytest.mark.slow
def test_pairs_with_deeply_nested_tools_are_kept_or_dropped(job_runner, shared_data):
    """The recursion limit depends on the depth of the caller, so a row that was read may be too deep for the template."""
    deep = [f'[{{"name": "a", "p": {"[" * depth}{"]" * depth}}}]' for depth in range(100, 1000, 18)]
    rows: list[Any] = [{**ASKED, "tools": text} for text in deep]
    rows += [json.dumps({**ASKED, "tools": "?"}).replace('"?"', text) for text in deep]
    done = job_runner.rows([ASKED, *rows])
    made = job_runner.pairs(done, job_runner.tokenizer(shared_data / "tokenizers" / "qwen2.5"))
    assert len(made.pairs) + made.details.counts.dropped == done.details.counts.pairs > 1
    assert done.details.counts.rows_read == 101


ADDRESSED = "{% for m in messages %}{{ to or 'all' }}: {{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.shared
def test_pairs_with_template_arguments_override_the_recipes(job_runner, tiny_chat, tmp_path):
    (tmp_path / "addressed.jinja").write_text(ADDRESSED)
    plain = {"prompt": [ASK], "chosen": [_message("assistant", "Because.")], "rejected": [BAD]}
    rows = [{**plain, "chat_template_kwargs": {"to": "Bo", "unused": None}}, plain]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = job_runner.preferences({"path": str(tmp_path / "rows.parquet")})
    assert [row.get("chat_template_kwargs") for row in read.table("preferences.parquet")] == ['{"to": "Bo"}', None]
    assert (
        read.made.fingerprint
        == job_runner.rows(rows).made.fingerprint
        != job_runner.rows([plain, plain]).made.fingerprint
    )
    spec = job_runner.tokenizer(tiny_chat, tmp_path / "addressed.jinja", template_kwargs={"to": "you"})
    done, tokenizer = job_runner.pairs(read, spec), AutoTokenizer.from_pretrained(tiny_chat)
    for index, to in enumerate(("Bo", "you")):
        ids = tokenizer.apply_chat_template([ASK, *plain["chosen"]], chat_template=ADDRESSED, return_dict=False, to=to)
        assert _chosen_ids(done, index) == ids


def test_split_ignores_ids_of_calls_and_earlier_reasoning(job_runner):
    """A template may drop both. Then these prompts have the same tokens."""
    rows = [
        {
            **THOUGHT,
            "prompt": [
                _message("user", f"Question {n // 2}"),
                _message("assistant", "", tool_calls=[_call("clock", {}, id=f"call{n}")], thinking=f"Thought {n}"),
                _message("tool", "12:00", tool_call_id=f"call{n}"),
            ],
        }
        for n in range(80)
    ]  # fmt: skip
    splits = [row["split"] for row in job_runner.rows(rows, fraction=0.5).table("preferences.parquet")]
    assert splits[::2] == splits[1::2] and set(splits) == {"train", "validation"}


def test_fingerprint_covers_reasoning_but_not_its_name(job_runner):
    other = {**THOUGHT, "chosen": [_message("assistant", "Wet.", reasoning_content="It is July.")]}
    same = {**THOUGHT, "chosen": [_message("assistant", "Wet.", thinking="It is June.")]}
    fingerprints = [job_runner.rows([row]).made.fingerprint for row in (THOUGHT, other, same)]
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
