"""Messages and preference pairs, and the rules for every pair, whatever format it came in.

A pair is one prompt (messages, the last from the user) and two different answers of the assistant. A row that breaks the
rules is neither repaired nor dropped: it goes to quarantine with a `Reason`, which is counted, and a detail about that
row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]
Message = dict[str, str]

# Of one text: about a million tokens. A tokenizer needs 190 bytes for each character while it works, so a whole log file that
# slipped into a row by mistake would exhaust the memory.
_MOST_CHARACTERS = 1 << 22
_ROLES = ("system", "user", "assistant")
# Fields of a message that change what the model would have seen: leaving them out trains on another conversation.
_UNSUPPORTED_FIELDS = (
    "tool_calls",
    "function_call",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    "images",
    "audio",
)


class Reason(StrEnum):
    BAD_JSON = "bad JSON"
    BAD_UNICODE = "invalid unicode"
    DUPLICATE_KEY = "duplicate key"
    NOT_AN_OBJECT = "not an object"
    MISSING_FIELD = "missing field"
    WRONG_TYPE = "wrong type"
    UNSUPPORTED_FIELD = "unsupported field"
    UNKNOWN_ROLE = "unknown role"
    EMPTY_PROMPT = "empty prompt"
    EMPTY_RESPONSE = "empty response"
    IDENTICAL = "chosen equals rejected"
    PROMPTS_DIFFER = "prompts differ"
    RESPONSE_ROLE = "response not from the assistant"
    PROMPT_ROLE = "prompt does not end with the user"
    ENORMOUS = "enormous text"
    BAD_TRANSCRIPT = "not a transcript"
    TIE = "tie"
    UNKNOWN_LABEL = "unknown label"


class Quarantined(Exception):
    """This row cannot become a pair: `reason` is counted, `detail` says what is wrong in it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Pair:
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]


@dataclass(frozen=True)
class MessageStyle:
    """How a format spells a message: the names of its two fields, and of the roles."""

    role: str
    content: str
    roles: Mapping[str, str]


OPENAI_STYLE = MessageStyle("role", "content", {role: role for role in _ROLES})
SHAREGPT_STYLE = MessageStyle(
    "from",
    "value",
    {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
)


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def field_of(row: Row, name: str, place: str = "") -> Any:
    """The field `name` of a row, or of the part of one at `place`."""
    if name not in row or row[name] is None:
        raise Quarantined(Reason.MISSING_FIELD, f"`{place}{name}` is missing")
    return row[name]


def text_of(row: Row, name: str) -> str:
    return clean_text(field_of(row, name), name)


def optional_text(row: Row, name: str) -> str:
    """The text of a field that may be absent or null: then the empty string."""
    return text_of(row, name) if row.get(name) is not None else ""


def clean_text(value: Any, place: str) -> str:
    """`value` if it is text that every tokenizer and file format here can hold."""
    if not isinstance(value, str):
        raise Quarantined(Reason.WRONG_TYPE, f"`{place}` is {type(value).__name__}, expected text")
    if len(value) > _MOST_CHARACTERS:
        raise Quarantined(
            Reason.ENORMOUS, f"`{place}` has {len(value):,} characters, at most {_MOST_CHARACTERS:,} are accepted"
        )
    if "\0" in value:
        raise Quarantined(Reason.BAD_UNICODE, f"`{place}` has a NUL character at {value.index(chr(0))}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Quarantined(Reason.BAD_UNICODE, f"`{place}` has a lone surrogate at {error.start}") from None
    return value


def messages_of(row: Row, name: str, style: MessageStyle = OPENAI_STYLE) -> tuple[Message, ...]:
    """The messages in a field: a list of them, or one alone."""
    found = field_of(row, name)
    listed = [found] if isinstance(found, Mapping) else found
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise Quarantined(Reason.WRONG_TYPE, f"`{name}` is {type(found).__name__}, expected a list of messages")
    return tuple(_message(item, f"{name}[{index}]", style) for index, item in enumerate(listed))


def refuse_unsupported(row: Row, names: Sequence[str], place: str) -> None:
    """Raises Quarantined for a field that is not empty; some files write an empty list as text."""
    for name in names:
        if row.get(name) and row[name] != "[]":
            raise Quarantined(Reason.UNSUPPORTED_FIELD, f"`{place}` has `{name}`, which is not supported")


def make_pair(prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """The pair, if it keeps the rules; raises Quarantined for the first it breaks."""
    if not prompt:
        raise Quarantined(Reason.EMPTY_PROMPT, "the prompt has no message")
    for index, turn in enumerate(prompt):
        if turn["role"] != "system" and not turn["content"].strip():
            raise Quarantined(Reason.EMPTY_PROMPT, f"message {index} of the prompt, from the {turn['role']}, is empty")
    if prompt[-1]["role"] != "user":
        raise Quarantined(Reason.PROMPT_ROLE, f"the last message of the prompt is from the {prompt[-1]['role']}")
    _check_response(chosen, "chosen")
    _check_response(rejected, "rejected")
    if list(chosen) == list(rejected):
        raise Quarantined(Reason.IDENTICAL, "both responses are the same text")
    return Pair(tuple(prompt), tuple(chosen), tuple(rejected))


def _check_response(response: Sequence[Message], side: str) -> None:
    if not response:
        raise Quarantined(Reason.EMPTY_RESPONSE, f"`{side}` has no message")
    if roles := [turn["role"] for turn in response if turn["role"] != "assistant"]:
        raise Quarantined(Reason.RESPONSE_ROLE, f"`{side}` has a message from the {roles[0]}, expected one answer")
    if len(response) > 1:
        raise Quarantined(Reason.WRONG_TYPE, f"`{side}` has {len(response)} messages, expected one")
    if not response[0]["content"].strip():
        raise Quarantined(Reason.EMPTY_RESPONSE, f"`{side}` is empty")


def _message(item: Any, place: str, style: MessageStyle) -> Message:
    if not isinstance(item, Mapping):
        raise Quarantined(Reason.WRONG_TYPE, f"`{place}` is {type(item).__name__}, expected a message")
    refuse_unsupported(item, _UNSUPPORTED_FIELDS, place)
    role = clean_text(field_of(item, style.role, f"{place}."), f"{place}.{style.role}")
    if role not in style.roles:
        expected = ", ".join(style.roles)
        raise Quarantined(Reason.UNKNOWN_ROLE, f"`{place}` is from {role[:40]!r}, expected one of {expected}")
    return message(style.roles[role], _content(field_of(item, style.content, f"{place}."), f"{place}.{style.content}"))


def _content(value: Any, place: str) -> str:
    """Text, or the joined text of a list of {"type": "text", "text": ...} parts."""
    if not isinstance(value, list):
        return clean_text(value, place)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise Quarantined(Reason.UNSUPPORTED_FIELD, f"`{place}[{index}]` is not a part of type text")
        parts.append(clean_text(field_of(part, "text", f"{place}[{index}]."), f"{place}[{index}].text"))
    return "".join(parts)
