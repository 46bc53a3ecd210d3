"""Roles of messages: the developer's role and the recipe's `roles`. Oracle: pairs written by hand."""

import json
from typing import Any

import pytest

from training.data.formats.formats import FORMATS
from training.data.formats.messages import with_roles
from training.data.formats.quarantine import Quarantined, QuarantineReason


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


RULE, ASK = _message("developer", "Be brief."), _message("user", "Why?")
GOOD, BAD = _message("assistant", "Because."), _message("assistant", "No idea.")
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
def test_convert_developer_message_is_treated_like_a_system_message(content):
    """It may be empty. The same text in the field `system` does not add a message."""
    row = {**OPENAI, "prompt": [_message("developer", content), ASK], "system": "Be brief." if content else ""}
    assert list(FORMATS["conversational"].convert(row).prompt) == [_message("developer", content), ASK]


def test_convert_developer_message_beside_another_system_prompt_keeps_both():
    pair = FORMATS["conversational"].convert({**OPENAI, "system": "Be kind."})
    assert list(pair.prompt) == [_message("system", "Be kind."), RULE, ASK]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**OPENAI, "prompt": [ASK, RULE]}, QuarantineReason.PROMPT_ROLE),
        ({**OPENAI, "rejected": [RULE]}, QuarantineReason.RESPONSE_ROLE),
    ],
)
def test_convert_developer_message_as_question_or_response_raises_the_reason(row, reason):
    with pytest.raises(Quarantined) as caught:
        FORMATS["conversational"].convert(row)
    assert caught.value.reason is reason


MAPPED: list[tuple[dict[str, Any], dict[str, str]]] = [
    (OPENAI, {"developer": "system"}),
    (SHAREGPT, {"developer": "system"}),
    (
        {"prompt": [_message("rule", "Be brief."), _message("customer", "Why?")], "chosen": _message("bot", "Because."),
         "rejected": [_message("bot", "No idea.")]},
        {"rule": "system", "customer": "user", "bot": "assistant"},
    ),
    (
        {"input": {"messages": [_message("rule", "Be brief."), ASK], "tools": []}, "preferred_output": [GOOD],
         "non_preferred_output": [BAD]},
        {"rule": "system"},
    ),
    (
        {"prompt": [_message("system", "Be brief."), _message("assistant", "Why?")], "chosen": [_message("user", "Because.")],
         "rejected": [_message("user", "No idea.")]},
        {"user": "assistant", "assistant": "user"},
    ),
    (
        {"conversations": [{"from": "rule", "value": "Be brief."}, {"from": "human", "value": "Why?"}],
         "chosen": {"from": "function_call", "value": "Because."}, "rejected": {"from": "gpt", "value": "No idea."}},
        {"rule": "system", "function_call": "assistant"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "roles"), MAPPED)
def test_preferences_with_roles_reads_the_same_pair(job_runner, row, roles):
    """The mapping overrides the built-in roles: the last row has `function_call` for the assistant's text."""
    done = job_runner.preferences({**job_runner.source([row]), "roles": roles})
    [pair] = done.table("preferences.parquet")
    assert pair["prompt"] == [_message("system", "Be brief."), ASK]
    assert (pair["chosen"], pair["rejected"]) == ([GOOD], [BAD])


def test_preferences_with_roles_applies_them_after_columns_and_keeps_bad_rows_as_they_were(job_runner):
    bad = {"q": [_message("visitor", "Why?"), _message("robot", "Hm.")], "chosen": [GOOD], "rejected": [BAD]}
    good = {**bad, "q": [_message("visitor", "Why?")]}
    source = {**job_runner.source([good, bad]), "columns": {"prompt": "q"}, "roles": {"visitor": "user"}}
    done = job_runner.preferences(source)
    assert [pair["prompt"] for pair in done.table("preferences.parquet")] == [[ASK]]
    [row] = done.table("quarantine.parquet")
    assert (row["reason"], json.loads(row["text"])) == ("unknown role", bad)


def test_preferences_with_roles_that_change_nothing_keeps_the_fingerprint(job_runner):
    plain, mapped = job_runner.source([OPENAI]), {**job_runner.source([OPENAI]), "roles": {"visitor": "user"}}
    assert job_runner.preferences(plain).made.fingerprint == job_runner.preferences(mapped).made.fingerprint


def test_with_roles_leaves_tools_and_template_arguments_alone():
    """They may have a field `role`, but are not messages."""
    row = {"tools": [{"name": "a", "role": "user"}], "chat_template_kwargs": {"role": "user"}, "prompt": [ASK]}
    assert with_roles(row, {"user": "tool"}) == {**row, "prompt": [{**ASK, "role": "tool"}]}


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("conversational", {**OPENAI, "prompt": [_message("robot", "x")]}, "prompt"),
        ("sharegpt", {**SHAREGPT, "conversations": [{"from": "robot", "value": "x"}]}, "conversations"),
    ],
)
def test_convert_unknown_role_advises_roles(name, row, field):
    with pytest.raises(Quarantined) as caught:
        FORMATS[name].convert(row)
    assert caught.value.reason is QuarantineReason.UNKNOWN_ROLE
    assert all(value in caught.value.detail for value in (f"`{field}[0]`", "'robot'", "`roles: {'robot': user}`"))
