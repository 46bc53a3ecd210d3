"""Messages and preference pairs, with the rules that pairs of every format keep.

A prompt is a list of messages. The last one is from the user or a tool. The two responses differ. A response is one message of
the assistant, or several with the results of tool calls between them. A row that breaks a rule goes to quarantine.
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

# All messages have `role` and `content`. The assistant's may have `reasoning_content` and `tool_calls`, a tool's `tool_call_id`
# and `name`.
Message = dict[str, str]

_ROLES: tuple[Role, ...] = get_args(Role)
INSTRUCTING: tuple[Role, ...] = ("system", "developer")
_MAY_BE_EMPTY, _ASKING = (*INSTRUCTING, "tool"), ("user", "tool")
ANSWERING = ("assistant", "tool")
_RESULT_FIELDS = ("tool_call_id", "name")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms, as in transformers' chat templates
_ROLE_OF_FIELD = {"tool_call_id": "tool", **dict.fromkeys(("tool_calls", *_REASONING), "assistant")}
# Fields that the model would see. Without them, it would be trained on another conversation.
_UNSUPPORTED_FIELDS = (
    *("function_call", "function_calls", "functions"),
    *("image", "images", "video", "videos", "audio", "audios"),
)


@dataclass(frozen=True)
class Pair:
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: str = ""  # JSON text
    chat_template_kwargs: str = ""  # JSON text


@dataclass(frozen=True)
class MessageStyle:
    """The layout of a format's messages: names of the two fields and of the roles. `calling` is the role of tool calls."""

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
_FIELDS_WITHOUT_MESSAGES = ("tools", "chat_template_kwargs")


def with_roles(row: Row, roles: Mapping[str, str]) -> Row:
    """Return `row` with the roles of its messages replaced as `roles` maps them."""
    return {
        name: value if name in _FIELDS_WITHOUT_MESSAGES else _map_roles(value, roles) for name, value in row.items()
    }


def _map_roles(value: Any, roles: Mapping[str, str]) -> Any:
    """Replace the roles in a field: a message, a list of messages, or an object with such a list in `messages`."""
    if isinstance(value, list | tuple):
        return [_map_role(item, roles) for item in value]
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list | tuple):
        return {**value, "messages": [_map_role(item, roles) for item in value["messages"]]}
    return _map_role(value, roles)


def _map_role(item: Any, roles: Mapping[str, str]) -> Any:
    if not isinstance(item, Mapping):
        return item
    present = {name: item[name] for name in _ROLE_FIELDS if isinstance(item.get(name), str)}
    return {**item, **{name: roles.get(role, role) for name, role in present.items()}}


def messages_of(row: Row, name: str, style: MessageStyle = OPENAI_STYLE) -> tuple[Message, ...]:
    """Return the messages in a field, which holds a list or a single message. Raises Quarantined."""
    value = field_of(row, name)
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`{name}` is {type(value).__name__}, expected a list of messages"
        )
    return tuple(_message(item, f"{name}[{index}]", style) for index, item in enumerate(items))


def make_pair(prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """Return the pair. Raise Quarantined for the first rule that it breaks."""
    if not prompt:
        raise Quarantined(QuarantineReason.EMPTY_PROMPT, "the prompt has 0 messages")
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
        raise Quarantined(QuarantineReason.IDENTICAL, "both responses are the same")
    return Pair(tuple(prompt), tuple(chosen), tuple(rejected))


def pair_of_conversations(chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """Return the pair in two conversations, which may differ only after the last question. Raises Quarantined."""
    if list(chosen) == list(rejected):
        raise Quarantined(QuarantineReason.IDENTICAL, "both conversations are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    start = shared
    while start and chosen[start - 1]["role"] == "assistant":
        start -= 1  # the same tool call in both, with different results after it
    differing = (*chosen[start:], *rejected[start:])
    if any(turn["role"] not in ANSWERING for turn in differing) or shared == min(len(chosen), len(rejected)):
        raise Quarantined(
            QuarantineReason.PROMPTS_DIFFER,
            f"the chosen conversation has {len(chosen)} messages and the rejected one {len(rejected)}; they differ after the "
            f"first {shared}; only the messages after the last question may differ",
        )
    return make_pair(chosen[:start], chosen[start:], rejected[start:])


def repeating_prompt(prompt: Sequence[Message], name: str, pair: Pair) -> Pair:
    """Return `pair`. Raise Quarantined unless its prompt has every message of `prompt`, which is in the field `name`."""
    if any(turn not in pair.prompt for turn in prompt):
        raise Quarantined(
            QuarantineReason.PROMPTS_DIFFER,
            f"the conversation in `chosen` does not begin with the messages in `{name}`",
        )
    return pair


def _check_response(response: Sequence[Message], side: str) -> None:
    if not response:
        raise Quarantined(QuarantineReason.EMPTY_RESPONSE, f"`{side}` has 0 messages")
    roles = [turn["role"] for turn in response]
    wrong_ends = [role for role in (roles[0], roles[-1]) if role != "assistant"]
    if wrong := wrong_ends + [role for role in roles if role not in ANSWERING]:
        raise Quarantined(
            QuarantineReason.RESPONSE_ROLE,
            f"`{side}` has a message from the {wrong[0]}, expected messages of the assistant, with tool results between them",
        )
    if ("assistant", "assistant") in pairwise(roles):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`{side}` has two messages of the assistant in a row, expected one"
        )
    if any(turn["role"] == "assistant" and _is_empty(turn) for turn in response):
        raise Quarantined(QuarantineReason.EMPTY_RESPONSE, f"`{side}` is empty")


def _is_empty(turn: Message) -> bool:
    return not turn["content"].strip() and "tool_calls" not in turn


def _message(item: Any, path: str, style: MessageStyle) -> Message:
    if not isinstance(item, Mapping):
        raise Quarantined(QuarantineReason.WRONG_TYPE, f"`{path}` is {type(item).__name__}, expected a message")
    is_plain = item.keys() == {style.role, style.content}
    if not is_plain:
        check_supported(item, _UNSUPPORTED_FIELDS, path)
    speaker = text_of(item, style.role, f"{path}.")
    if speaker not in style.roles:
        raise Quarantined(
            QuarantineReason.UNKNOWN_ROLE,
            f"`{path}` is from {speaker[:40]!r}, expected one of {', '.join(style.roles)}; map it to one of "
            f"{', '.join(_ROLES)} in `roles` of the source, as in `roles: {{{speaker[:40]!r}: user}}`",
        )
    role = style.roles[speaker]
    extras = {} if is_plain else _extra_fields(item, path, role)
    if speaker == style.calling:
        check_supported(item, ("tool_calls",), path)
        text = text_of(item, style.content, f"{path}.")
        return message(role, "") | extras | _calls_in_content(text, f"{path}.{style.content}")
    only_calls = "tool_calls" in extras and item.get(style.content) is None
    content = "" if only_calls else _content(field_of(item, style.content, f"{path}."), f"{path}.{style.content}")
    return message(role, content) | extras


def _calls_in_content(text: str, path: str) -> Message:
    """Return the calls in a message's text: JSON of a list of calls, or of one call."""
    calls = calls_text(text if text.lstrip().startswith("[") else f"[{text}]", path)
    return {"tool_calls": calls} if calls else {}


def _extra_fields(item: Row, path: str, role: str) -> Message:
    """Return the fields beside role and content: the assistant's reasoning and calls, or the id and name of a tool result."""
    check_supported(item, [name for name, owner in _ROLE_OF_FIELD.items() if owner != role], path)
    if role == "tool":
        return {name: text_of(item, name, f"{path}.") for name in _RESULT_FIELDS if item.get(name)}
    name = next((name for name in _REASONING if item.get(name)), None)
    reasoning = {"reasoning_content": text_of(item, name, f"{path}.")} if name else {}
    calls = calls_text(item.get("tool_calls"), f"{path}.tool_calls")
    return reasoning | ({"tool_calls": calls} if calls else {})


def _content(value: Any, path: str) -> str:
    """Return a text, or the joined text of a list of {"type": "text", "text": ...} parts."""
    if not isinstance(value, list):
        return clean_text(value, path)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise Quarantined(QuarantineReason.UNSUPPORTED_FIELD, f"`{path}[{index}]` is not a part of type text")
        parts.append(text_of(part, "text", f"{path}[{index}]."))
    return "".join(parts)
