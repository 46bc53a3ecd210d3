"""A conversation as templates know it, and a marked copy of it, which tells whether a template writes all of it.

In the copy words that occur nowhere else stand for messages and results, for names of functions, and, in the answer, for
reasoning and for text beside a call; a template has to write all of them. What was reasoned in earlier messages, or said beside
a call, many leave out, as they do when a model is served. Some write the id of a call for its name, which the id holds: a
second copy has marks in the ids too.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from training.data.formats.tools import Item, function_of, with_function

Shape = tuple[int | tuple[str, bool], ...]


@dataclass(frozen=True)
class Conversation:
    """Messages, the last `answer` of which are the answer; the tools that they may use; what else the template is given."""

    turns: list[Item]
    answer: int = 0
    tools: list[Item] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape | None:
        """All that decides which messages a template leaves out, where they are text alone; None where they are not."""
        texts = all(turn.keys() == {"role", "content"} for turn in self.turns)
        is_plain = texts and not self.tools and not self.template_kwargs
        return (self.answer, *((turn["role"], _says(turn)) for turn in self.turns)) if is_plain else None

    @property
    def said(self) -> list[str]:
        """What the assistant says in the answer."""
        turns = self.turns[len(self.turns) - self.answer :]
        return [turn["content"] for turn in turns if turn["role"] == "assistant" and _says(turn)]


@dataclass(frozen=True)
class MarkedConversation:
    """A marked copy, and what each mark in it stands for: all of them, those in the answer, and of these what tools say."""

    copy: Conversation
    marks: dict[str, str]
    of_assistant: dict[str, str]
    of_tools: dict[str, str]


def spelled_out(pair: Mapping[str, Any], side: str | None) -> Conversation:
    """The prompt of a row of `raw_preferences`, and its answer on `side`; objects for JSON text, and without what is absent."""
    answer = pair[side] if side else ()
    tools, template_kwargs = pair.get("tools"), pair.get("chat_template_kwargs")
    return Conversation(
        [_spelled_out(turn) for turn in (*pair["prompt"], *answer)],
        len(answer),
        json.loads(tools) if tools else None,
        json.loads(template_kwargs) if template_kwargs else {},
    )


def marked(conversation: Conversation, in_ids: bool) -> MarkedConversation:
    """A copy with marks for all that says something. With `in_ids` ids have them as well."""
    marker = _Marker(conversation, in_ids)
    tools = conversation.tools and [marker.function(tool, "the tool") for tool in conversation.tools]
    start = len(conversation.turns) - conversation.answer
    turns = [marker.turn(turn) for turn in conversation.turns[:start]]
    turns += [marker.answer(turn) for turn in conversation.turns[start:]]
    return MarkedConversation(
        replace(conversation, turns=turns, tools=tools), marker.marks, marker.of_assistant, marker.of_tools
    )


def left_out(text: str, marks: Mapping[str, str]) -> str | None:
    """What the first mark stands for that is not in `text`, which may be in capitals."""
    folded = text.casefold()
    return next((meaning for mark, meaning in marks.items() if mark not in folded), None)


class _Marker:
    """Puts marks into a copy of a conversation, in which none of them occurs."""

    def __init__(self, conversation: Conversation, in_ids: bool) -> None:
        self.marks: dict[str, str] = {}
        self.of_assistant: dict[str, str] = {}
        self.of_tools: dict[str, str] = {}
        self._conversation, self._in_ids = conversation, in_ids
        self._ids: dict[str, str] = {}

    @cached_property
    def _stem(self) -> str:
        """A word that is not in the conversation, since it is made from its hash."""
        return "mark" + hashlib.sha256(repr(self._conversation).encode(errors="backslashreplace")).hexdigest()[:16]

    def turn(self, turn: Item) -> Item:
        marks, role = Item(), turn["role"]
        if "tool_calls" in turn:
            marks["tool_calls"] = [self.function(call, "a call of") for call in turn["tool_calls"]]
        elif _says(turn):
            marks["content"] = self._mark("the result of a tool" if role == "tool" else f"a message of the {role}")
        if turn.get("tool_call_id") in self._ids:
            marks["tool_call_id"] = self._ids[turn["tool_call_id"]]
        return {**turn, **marks}

    def answer(self, turn: Item) -> Item:
        before, copy = len(self.marks), self.turn(turn)
        if turn.get("reasoning_content", "").strip():
            copy["reasoning_content"] = self._mark("the reasoning before an answer")
        if "tool_calls" in turn and _says(turn):
            copy["content"] = self._mark("the text beside a call")
        of_role = self.of_assistant if turn["role"] == "assistant" else self.of_tools
        of_role.update(list(self.marks.items())[before:])
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


def _says(turn: Item) -> bool:
    return bool(turn["content"].strip())


def _spelled_out(turn: Mapping[str, str | None]) -> Item:
    given: Item = {name: value for name, value in turn.items() if value is not None}
    return given | {"tool_calls": json.loads(calls)} if (calls := given.get("tool_calls")) else given
