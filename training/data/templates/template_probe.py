"""Conversations as templates get them, and marked copies that show which parts a template writes.

In a copy, unique marks replace messages, tool results, names of functions, and, in the response, the reasoning and the text
beside a call. A template must write all marks.

Earlier reasoning and earlier text beside a call are not marked, because many templates drop them also when a model is served.
Some templates write the id of a call instead of its name. The id contains the name, so a second copy has marks in the ids too.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from training.data.formats.tools import Item, function_of, with_function

Shape = tuple[int | tuple[str, bool], ...]
_PLAIN_FIELDS = {"role", "content"}


@dataclass(frozen=True)
class Conversation:
    """The input of a template: messages, tools and arguments. The last `answer` messages are the response."""

    turns: list[Item]
    answer: int = 0
    tools: list[Item] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape | None:
        """The key of conversations of plain text that a template treats alike; None for other conversations."""
        if self.tools or self.template_kwargs or not all(turn.keys() == _PLAIN_FIELDS for turn in self.turns):
            return None
        return (self.answer, *[(turn["role"], _has_text(turn)) for turn in self.turns])

    @property
    def response_texts(self) -> list[str]:
        """The texts of the assistant in the response."""
        turns = self.turns[len(self.turns) - self.answer :]
        return [turn["content"] for turn in turns if turn["role"] == "assistant" and _has_text(turn)]


@dataclass(frozen=True)
class MarkedConversation:
    """A marked copy, with the meaning of each mark: of all marks, and of the response's marks by role."""

    copy: Conversation
    marks: dict[str, str]
    assistant_marks: dict[str, str]
    result_marks: dict[str, str]


def conversations_of(pair: Mapping[str, Any]) -> list[Conversation]:
    """Return the prompt of a row of `raw_preferences` alone, with the chosen and with the rejected response.

    JSON text is parsed, and nulls are removed.
    """
    tools, template_kwargs = pair.get("tools"), pair.get("chat_template_kwargs")
    parsed = json.loads(tools) if tools else None, json.loads(template_kwargs) if template_kwargs else {}
    prompt, *responses = ([_parse_turn(turn) for turn in pair[part]] for part in ("prompt", "chosen", "rejected"))
    return [Conversation([*prompt, *response], len(response), *parsed) for response in ([], *responses)]


def marked(conversation: Conversation, in_ids: bool) -> MarkedConversation:
    """Return a copy with marks for all texts and names. With `in_ids`, also in the ids of calls."""
    marker = _Marker(conversation, in_ids)
    tools = conversation.tools and [marker.function(tool, "the tool") for tool in conversation.tools]
    start = len(conversation.turns) - conversation.answer
    turns = [marker.turn(turn) for turn in conversation.turns[:start]]
    turns += [marker.answer(turn) for turn in conversation.turns[start:]]
    return MarkedConversation(
        replace(conversation, turns=turns, tools=tools), marker.marks, marker.assistant_marks, marker.result_marks
    )


def left_out(text: str, marks: Mapping[str, str]) -> str | None:
    """Return the meaning of the first mark that `text` lacks. The template may have changed the case."""
    folded = text.casefold()
    return next((meaning for mark, meaning in marks.items() if mark not in folded), None)


class _Marker:
    """Puts marks into a copy of a conversation."""

    def __init__(self, conversation: Conversation, in_ids: bool) -> None:
        self.marks: dict[str, str] = {}
        self.assistant_marks: dict[str, str] = {}
        self.result_marks: dict[str, str] = {}
        self._conversation, self._in_ids = conversation, in_ids
        self._ids: dict[str, str] = {}

    @cached_property
    def _stem(self) -> str:
        """A word from the conversation's hash, so that the conversation does not contain it."""
        return "mark" + hashlib.sha256(repr(self._conversation).encode(errors="backslashreplace")).hexdigest()[:16]

    def turn(self, turn: Item) -> Item:
        marks, role = Item(), turn["role"]
        if "tool_calls" in turn:
            marks["tool_calls"] = [self.function(call, "a call of") for call in turn["tool_calls"]]
        elif _has_text(turn):
            marks["content"] = self._mark("the result of a tool" if role == "tool" else f"a message of the {role}")
        if turn.get("tool_call_id") in self._ids:
            marks["tool_call_id"] = self._ids[turn["tool_call_id"]]
        return {**turn, **marks}

    def answer(self, turn: Item) -> Item:
        count, copy = len(self.marks), self.turn(turn)
        if turn.get("reasoning_content", "").strip():
            copy["reasoning_content"] = self._mark("the reasoning before a response")
        if "tool_calls" in turn and _has_text(turn):
            copy["content"] = self._mark("the text beside a call")
        role_marks = self.assistant_marks if turn["role"] == "assistant" else self.result_marks
        role_marks.update(list(self.marks.items())[count:])
        return copy

    def function(self, item: Item, kind: str) -> Item:
        name = function_of(item)["name"]
        mark = self._mark(f"{kind} {name!r}")
        copy = with_function(item, name=mark)
        if self._in_ids and isinstance(id_ := item.get("id"), str):
            copy["id"] = self._ids[id_] = id_.replace(name, mark) if name else id_
        return copy

    def _mark(self, meaning: str) -> str:
        mark = f"{self._stem}n{len(self.marks)}end"
        self.marks[mark] = meaning
        return mark


def _has_text(turn: Item) -> bool:
    return bool(turn["content"].strip())


def _parse_turn(turn: Mapping[str, str | None]) -> Item:
    fields: Item = {name: value for name, value in turn.items() if value is not None}
    return fields | {"tool_calls": json.loads(calls)} if (calls := fields.get("tool_calls")) else fields
