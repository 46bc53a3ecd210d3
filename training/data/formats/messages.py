"""Messages and preference pairs, and the rules for every pair, whatever format it came in.

A pair is one prompt (messages, the last from the user or a tool) and two different answers of the assistant. An answer is a
message, which may be a call, or several with the results of their calls between them. A row that breaks the rules goes to
quarantine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from training.contract.config.fields import Role
from training.data.formats.quarantine import (
    Quarantined,
    QuarantineReason,
    Row,
    check_supported,
    clean_text,
    field_of,
    text_of,
)
from training.data.formats.tools import calls_text

# `role` and `content`; of an assistant, where given, `reasoning_content` and `tool_calls`; of a tool `tool_call_id` and `name`.
Message = dict[str, str]

_ROLES: tuple[Role, ...] = get_args(Role)
INSTRUCTING: tuple[Role, ...] = ("system", "developer")
_MAY_BE_EMPTY, _ASKING = (*INSTRUCTING, "tool"), ("user", "tool")
ANSWERING = ("assistant", "tool")
_OF_RESULTS = ("tool_call_id", "name")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for one thing, as in transformers' chat templates
_ONLY_OF = {"tool_call_id": "tool", **dict.fromkeys(("tool_calls", *_REASONING), "assistant")}
# Fields of a message that change what the model would have seen: leaving them out trains on another conversation.
_UNSUPPORTED_FIELDS = (
    *("function_call", "function_calls", "functions"),
    *("image", "images", "video", "videos", "audio", "audios"),
)


@dataclass(frozen=True)
class Pair:
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: str = ""  # JSON text, as the next
    chat_template_kwargs: str = ""


@dataclass(frozen=True)
class MessageStyle:
    """How a format spells a message: the names of its two fields, and of the roles; of one of these the content is calls."""

    role: str
    content: str
    roles: Mapping[str, str]
    calling: str | None = None


OPENAI_STYLE = MessageStyle("role", "content", {role: role for role in _ROLES})
SHAREGPT_STYLE = MessageStyle(
    "from",
    "value",
    {
        **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
        **{"function_call": "assistant", "observation": "tool", "tool": "tool", "developer": "developer"},
    },
    calling="function_call",
)


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_ROLE_FIELDS = (OPENAI_STYLE.role, SHAREGPT_STYLE.role)
_NOT_SAID = ("tools", "chat_template_kwargs")


def with_roles(row: Row, roles: Mapping[str, str]) -> Row:
    """Return `row` with each role of a message that is one of `roles` replaced by the role that it stands for."""
    return {name: value if name in _NOT_SAID else _with_roles(value, roles) for name, value in row.items()}


def _with_roles(value: Any, roles: Mapping[str, str]) -> Any:
    """Return the same for a field: a message, a list of them, or an object with such a list in `messages`."""
    if isinstance(value, list | tuple):
        return [_renamed(item, roles) for item in value]
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list | tuple):
        return {**value, "messages": [_renamed(item, roles) for item in value["messages"]]}
    return _renamed(value, roles)


def _renamed(item: Any, roles: Mapping[str, str]) -> Any:
    if not isinstance(item, Mapping):
        return item
    given = {name: item[name] for name in _ROLE_FIELDS if isinstance(item.get(name), str)}
    return {**item, **{name: roles.get(role, role) for name, role in given.items()}}


def messages_of(row: Row, name: str, style: MessageStyle = OPENAI_STYLE) -> tuple[Message, ...]:
    """The messages in a field: a list of them, or one alone."""
    found = field_of(row, name)
    listed = [found] if isinstance(found, Mapping) else found
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`{name}` is {type(found).__name__}, expected a list of messages"
        )
    return tuple(_message(item, f"{name}[{index}]", style) for index, item in enumerate(listed))


def make_pair(prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """The pair, if it keeps the rules; raises Quarantined for the first it breaks."""
    if not prompt:
        raise Quarantined(QuarantineReason.EMPTY_PROMPT, "the prompt has no message")
    for index, turn in enumerate(prompt):
        if turn["role"] not in _MAY_BE_EMPTY and _is_empty(turn):
            raise Quarantined(
                QuarantineReason.EMPTY_PROMPT, f"message {index} of the prompt, from the {turn['role']}, is empty"
            )
    if prompt[-1]["role"] not in _ASKING:
        raise Quarantined(
            QuarantineReason.PROMPT_ROLE, f"the last message of the prompt is from the {prompt[-1]['role']}"
        )
    _check_response(chosen, "chosen")
    _check_response(rejected, "rejected")
    if list(chosen) == list(rejected):
        raise Quarantined(QuarantineReason.IDENTICAL, "both responses are the same text")
    return Pair(tuple(prompt), tuple(chosen), tuple(rejected))


def pair_of_conversations(chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """Return the pair in two whole conversations, which may differ only in what follows the last question."""
    if list(chosen) == list(rejected):
        raise Quarantined(QuarantineReason.IDENTICAL, "both conversations are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    start = shared
    while start and chosen[start - 1]["role"] == "assistant":
        start -= 1  # both say the same there, to which tools answer differently
    differing = (*chosen[start:], *rejected[start:])
    if any(turn["role"] not in ANSWERING for turn in differing) or shared == min(len(chosen), len(rejected)):
        raise Quarantined(
            QuarantineReason.PROMPTS_DIFFER,
            f"the chosen conversation has {len(chosen)} messages and the rejected one {len(rejected)}; they differ after the "
            f"first {shared}; only what follows the last question may differ",
        )
    return make_pair(chosen[:start], chosen[start:], rejected[start:])


def repeating_prompt(prompt: Sequence[Message], name: str, pair: Pair) -> Pair:
    """Return `pair` if its prompt holds every message of `prompt`, which is in the field `name`."""
    if any(turn not in pair.prompt for turn in prompt):
        raise Quarantined(
            QuarantineReason.PROMPTS_DIFFER, f"`{name}` is not what the conversations in `chosen` begin with"
        )
    return pair


def _check_response(response: Sequence[Message], side: str) -> None:
    if not response:
        raise Quarantined(QuarantineReason.EMPTY_RESPONSE, f"`{side}` has no message")
    roles = [turn["role"] for turn in response]
    outside = [role for role in (roles[0], roles[-1]) if role != "assistant"]
    if others := outside + [role for role in roles if role not in ANSWERING]:
        raise Quarantined(
            QuarantineReason.RESPONSE_ROLE,
            f"`{side}` has a message from the {others[0]}, expected an answer of the assistant, with results of tools inside",
        )
    if ("assistant", "assistant") in pairwise(roles):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`{side}` has two messages of the assistant in a row, expected one"
        )
    if any(turn["role"] == "assistant" and _is_empty(turn) for turn in response):
        raise Quarantined(QuarantineReason.EMPTY_RESPONSE, f"`{side}` is empty")


def _is_empty(turn: Message) -> bool:
    return not turn["content"].strip() and "tool_calls" not in turn


def _message(item: Any, place: str, style: MessageStyle) -> Message:
    if not isinstance(item, Mapping):
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{place}` is {type(item).__name__}, expected a message")
    check_supported(item, _UNSUPPORTED_FIELDS, place)
    given = text_of(item, style.role, f"{place}.")
    if given not in style.roles:
        raise Quarantined(
            QuarantineReason.UNKNOWN_ROLE,
            f"`{place}` is from {given[:40]!r}, expected one of {', '.join(style.roles)}; map it to one of "
            f"{', '.join(_ROLES)} in `roles` of the source, as in `roles: {{{given[:40]!r}: user}}`",
        )
    role, others = style.roles[given], _others(item, place, style.roles[given])
    if given == style.calling:
        check_supported(item, ("tool_calls",), place)
        text = text_of(item, style.content, f"{place}.")
        return message(role, "") | others | _called(text, f"{place}.{style.content}")
    only_calls = "tool_calls" in others and item.get(style.content) is None
    content = "" if only_calls else _content(field_of(item, style.content, f"{place}."), f"{place}.{style.content}")
    return message(role, content) | others


def _called(text: str, place: str) -> Message:
    """The calls that are the text of a message: JSON of a list of them, or of one alone."""
    calls = calls_text(text if text.lstrip().startswith("[") else f"[{text}]", place)
    return {"tool_calls": calls} if calls else {}


def _others(item: Row, place: str, role: str) -> Message:
    """What a message holds beside its content: the assistant's reasoning and calls; which call a tool answers."""
    check_supported(item, [name for name, whose in _ONLY_OF.items() if whose != role], place)
    if role == "tool":
        return {name: text_of(item, name, f"{place}.") for name in _OF_RESULTS if item.get(name)}
    given = next((name for name in _REASONING if item.get(name)), None)
    reasoning = {"reasoning_content": text_of(item, given, f"{place}.")} if given else {}
    calls = calls_text(item.get("tool_calls"), f"{place}.tool_calls")
    return reasoning | ({"tool_calls": calls} if calls else {})


def _content(value: Any, place: str) -> str:
    """Text, or the joined text of a list of {"type": "text", "text": ...} parts."""
    if not isinstance(value, list):
        return clean_text(value, place)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise Quarantined(QuarantineReason.UNSUPPORTED_FIELD, f"`{place}[{index}]` is not a part of type text")
        parts.append(text_of(part, "text", f"{place}[{index}]."))
    return "".join(parts)
