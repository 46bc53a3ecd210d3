"""Roles of messages: the developer's, and those that a recipe maps. Oracle: the pair that a person reads out of the rows."""

import json
from typing import Any

import pytest

from training.data.formats.formats import FORMATS
from training.data.formats.messages import with_roles
from training.data.formats.quarantine import Quarantined, QuarantineReason


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


RULE, ASK = _said("developer", "Be brief."), _said("user", "Why?")
GOOD, BAD = _said("assistant", "Because."), _said("assistant", "No idea.")
OPENAI = {"prompt": [RULE, ASK], "chosen": [GOOD], "rejected": [BAD]}
SHAREGPT = {
    "conversations": [{"from": "developer", "value": "Be brief."}, {"from": "human", "value": "Why?"}],
    "chosen": {"from": "gpt", "value": "Because."},
    "rejected": {"from": "gpt", "value": "No idea."},
}


@pytest.mark.parametrize(("name", "row"), [("conversational", OPENAI), ("sharegpt", SHAREGPT)])
def test_convert_developer_message_keeps_its_role(name, row):
    assert list(FORMATS[name].convert(row).prompt) == [RULE, ASK]


@pytest.mark.parametrize("content", ["Be brief.", " Be brief.\n", ""])
def test_convert_developer_message_may_say_what_a_system_message_may(content):
    """It may be empty, and the same text in the field `system` is not said again."""
    row = {**OPENAI, "prompt": [_said("developer", content), ASK], "system": "Be brief." if content else ""}
    assert list(FORMATS["conversational"].convert(row).prompt) == [_said("developer", content), ASK]


def test_convert_developer_message_beside_another_system_prompt_keeps_both():
    pair = FORMATS["conversational"].convert({**OPENAI, "system": "Be kind."})
    assert list(pair.prompt) == [_said("system", "Be kind."), RULE, ASK]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**OPENAI, "prompt": [ASK, RULE]}, QuarantineReason.PROMPT_ROLE),
        ({**OPENAI, "rejected": [RULE]}, QuarantineReason.RESPONSE_ROLE),
    ],
)
def test_convert_developer_message_neither_asks_nor_answers(row, reason):
    with pytest.raises(Quarantined) as caught:
        FORMATS["conversational"].convert(row)
    assert caught.value.reason is reason


MAPPED: list[tuple[dict[str, Any], dict[str, str]]] = [
    (OPENAI, {"developer": "system"}),
    (SHAREGPT, {"developer": "system"}),
    (
        {"prompt": [_said("rule", "Be brief."), _said("customer", "Why?")], "chosen": _said("bot", "Because."),
         "rejected": [_said("bot", "No idea.")]},
        {"rule": "system", "customer": "user", "bot": "assistant"},
    ),
    (
        {"input": {"messages": [_said("rule", "Be brief."), ASK], "tools": []}, "preferred_output": [GOOD],
         "non_preferred_output": [BAD]},
        {"rule": "system"},
    ),
    (
        {"prompt": [_said("system", "Be brief."), _said("assistant", "Why?")], "chosen": [_said("user", "Because.")],
         "rejected": [_said("user", "No idea.")]},
        {"user": "assistant", "assistant": "user"},
    ),
    (
        {"conversations": [{"from": "rule", "value": "Be brief."}, {"from": "human", "value": "Why?"}],
         "chosen": {"from": "function_call", "value": "Because."}, "rejected": {"from": "gpt", "value": "No idea."}},
        {"rule": "system", "function_call": "assistant"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "roles"), MAPPED)
def test_preferences_with_roles_reads_the_same_pair(workshop, row, roles):
    """The mapping goes before the built-in spellings: the last row has `function_call` for the assistant's text."""
    done = workshop.preferences({**workshop.source([row]), "roles": roles})
    [pair] = done.table("preferences.parquet")
    assert pair["prompt"] == [_said("system", "Be brief."), ASK]
    assert (pair["chosen"], pair["rejected"]) == ([GOOD], [BAD])


def test_preferences_with_roles_applies_them_after_columns_and_keeps_bad_rows_as_they_were(workshop):
    bad = {"q": [_said("visitor", "Why?"), _said("robot", "Hm.")], "chosen": [GOOD], "rejected": [BAD]}
    good = {**bad, "q": [_said("visitor", "Why?")]}
    source = {**workshop.source([good, bad]), "columns": {"prompt": "q"}, "roles": {"visitor": "user"}}
    done = workshop.preferences(source)
    assert [pair["prompt"] for pair in done.table("preferences.parquet")] == [[ASK]]
    [row] = done.table("quarantine.parquet")
    assert (row["reason"], json.loads(row["text"])) == ("unknown role", bad)


def test_preferences_with_roles_that_change_nothing_keeps_the_fingerprint(workshop):
    plain, mapped = workshop.source([OPENAI]), {**workshop.source([OPENAI]), "roles": {"visitor": "user"}}
    assert workshop.preferences(plain).made.fingerprint == workshop.preferences(mapped).made.fingerprint


def test_with_roles_leaves_tools_and_template_arguments_alone():
    """They may have a field of that name, which is no message's."""
    row = {"tools": [{"name": "a", "role": "user"}], "chat_template_kwargs": {"role": "user"}, "prompt": [ASK]}
    assert with_roles(row, {"user": "tool"}) == {**row, "prompt": [{**ASK, "role": "tool"}]}


@pytest.mark.parametrize(
    ("name", "row", "place"),
    [
        ("conversational", {**OPENAI, "prompt": [_said("robot", "x")]}, "prompt"),
        ("sharegpt", {**SHAREGPT, "conversations": [{"from": "robot", "value": "x"}]}, "conversations"),
    ],
)
def test_convert_unknown_role_advises_roles(name, row, place):
    with pytest.raises(Quarantined) as caught:
        FORMATS[name].convert(row)
    assert caught.value.reason is QuarantineReason.UNKNOWN_ROLE
    assert f"`{place}[0]` is from 'robot', expected one of " in caught.value.detail
    assert "in `roles` of the source" in caught.value.detail and "`roles: {'robot': user}`" in caught.value.detail
