"""The formats preference data is published in, each a pure function from a row to a pair.

    conversational   prompt, chosen, rejected: messages (or a prompt of plain text before message lists)
    implicit_prompt  chosen, rejected: whole conversations; what they share at the start is the prompt
    strings          prompt (or question), chosen, rejected: plain text
    sharegpt         conversations, chosen, rejected: messages spelled {from, value}
    hh               chosen, rejected: transcripts "\\n\\nHuman: ...\\n\\nAssistant: ..."
    alpaca           instruction, input, chosen, rejected: plain text
    openai           input.messages, preferred_output, non_preferred_output
    comparison       two responses and labels that say which is better (training/data/comparison.py)

A field that is in a column of another name is moved there before (training/data/columns.py).
In all of them a row may also have the fields `system`, for a system message in front, `tools` and `chat_template_kwargs`
(training/data/tools.py). A row that does not fit its format, or has what no format reads, such as images, raises `Quarantined`.
Formats are recognized by the fields of the first rows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.contract.errors import DataError
from training.data.comparison import compared_responses, winner_first
from training.data.messages import ANSWERING, SHAREGPT_STYLE, Message, Pair, make_pair, message, messages_of
from training.data.quarantine import (
    Quarantined,
    Reason,
    Row,
    clean_text,
    field_of,
    optional_text,
    refuse_unsupported,
    text_of,
)
from training.data.tools import template_kwargs_text, tools_text

_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
# What a trainer would pass to the template besides the messages, or show the model: it is part of the conversation.
_UNSUPPORTED_FIELDS = ("functions", "image", "images", "videos", "audios")


@dataclass(frozen=True)
class PreferenceFormat:
    """`fits` looks at a row's fields only; `read` raises Quarantined where their content is wrong."""

    fields: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], Pair]

    def convert(self, row: Row) -> Pair:
        """The pair in a row, with the system prompt, tools and template arguments that may come with it. Raises Quarantined."""
        refuse_unsupported(row, _UNSUPPORTED_FIELDS, "row")
        pair = self.read(row)
        tools = pair.tools or tools_text(row.get("tools"), "tools")
        template_kwargs = template_kwargs_text(row.get("chat_template_kwargs"), "chat_template_kwargs")
        return replace(pair, prompt=_with_system(row, pair.prompt), tools=tools, chat_template_kwargs=template_kwargs)


def detect(rows: Sequence[Row], place: str) -> str:
    """The format that fits most of `rows`, one at least. Raises DataError, naming what was considered, if none fits any."""
    votes = {name: sum(map(form.fits, rows)) for name, form in FORMATS.items()}
    best = max(votes, key=lambda name: votes[name])
    if votes[best]:
        return best
    considered = "; ".join(f"{name} ({form.fields})" for name, form in FORMATS.items())
    found = ", ".join(f"{name} ({_kind(value)})" for name, value in rows[0].items())
    raise DataError(
        f"{place}: none of the preference formats fits the first rows, whose fields are: {found}. Considered: {considered}. "
        "A row needs a prompt and two answers: say which columns hold them in `columns` of the source, as in "
        "`columns: {prompt: my_question}`"
    )


def _kind(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "text" if value else "empty"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__


def _conversational(row: Row, better: str = "chosen", worse: str = "rejected") -> Pair:
    prompt = _prompt(row)
    chosen, rejected = messages_of(row, better), messages_of(row, worse)
    if chosen and chosen[0]["role"] not in ANSWERING:  # whole conversations beside their prompt, as in UltraFeedback
        return _repeating_prompt(prompt, _after_shared_start(chosen, rejected))
    return make_pair(prompt, chosen, rejected)


def _implicit_prompt(row: Row, better: str = "chosen", worse: str = "rejected") -> Pair:
    return _after_shared_start(messages_of(row, better), messages_of(row, worse))


def _strings(row: Row) -> Pair:
    # A table of several sets has every field in every row.
    name = "question" if row.get("prompt") is None and "question" in row else "prompt"
    return _answers(row, (message("user", text_of(row, name)),))


def _sharegpt(row: Row) -> Pair:
    prompt, chosen, rejected = (
        messages_of(row, name, SHAREGPT_STYLE) for name in ("conversations", "chosen", "rejected")
    )
    return make_pair(prompt, chosen, rejected)


def _hh(row: Row) -> Pair:
    return _after_shared_start(_transcript(row, "chosen"), _transcript(row, "rejected"))


def _alpaca(row: Row) -> Pair:
    return _answers(row, (*_history(row), message("user", _instruction(row))))


def _openai(row: Row) -> Pair:
    holder = field_of(row, "input")
    if not isinstance(holder, dict):
        raise Quarantined(Reason.WRONG_TYPE, f"`input` is {type(holder).__name__}, expected an object with `messages`")
    refuse_unsupported(holder, ("functions",), "input")
    chosen, rejected = messages_of(row, "preferred_output"), messages_of(row, "non_preferred_output")
    pair = make_pair(messages_of(holder, "messages"), chosen, rejected)
    return replace(pair, tools=tools_text(holder.get("tools"), "input.tools"))


def _comparison(row: Row) -> Pair:
    sides, has_prompt = winner_first(row), row.get("prompt") is not None
    if _are(row, _LISTS, *sides):
        return _conversational(row, *sides) if has_prompt else _implicit_prompt(row, *sides)
    instructed = not has_prompt and "instruction" in row
    return _answers(row, (message("user", _instruction(row)),) if instructed else _prompt(row), *sides)


def _prompt(row: Row) -> tuple[Message, ...]:
    if isinstance(field_of(row, "prompt"), str):
        return (message("user", text_of(row, "prompt")),)
    return messages_of(row, "prompt")


def _instruction(row: Row) -> str:
    parts = (text_of(row, "instruction"), optional_text(row, "input"))
    return "\n\n".join(part for part in parts if part.strip())


def _history(row: Row) -> tuple[Message, ...]:
    """Earlier turns of an alpaca row: a list of [question, answer]."""
    turns: list[Message] = []
    for index, turn in enumerate(row.get("history") or ()):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise Quarantined(Reason.WRONG_TYPE, f"`history[{index}]` is not a [question, answer]")
        for role, content in zip(("user", "assistant"), turn, strict=True):
            turns.append(message(role, clean_text(content, f"history[{index}]")))
    return tuple(turns)


def _with_system(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """`turns`, after the row's `system` prompt if it has one and they do not begin with it."""
    first = message("system", optional_text(row, "system"))
    return (first, *turns) if first["content"].strip() and turns[0] != first else turns


def _answers(row: Row, prompt: tuple[Message, ...], better: str = "chosen", worse: str = "rejected") -> Pair:
    chosen, rejected = (message("assistant", text_of(row, side)) for side in (better, worse))
    return make_pair(prompt, (chosen,), (rejected,))


def _transcript(row: Row, name: str) -> tuple[Message, ...]:
    """The turns of a transcript; the one space after the colon is punctuation, everything else is content."""
    before, *turns = _TURN.split(text_of(row, name))
    if before.strip() or not turns:
        raise Quarantined(Reason.BAD_TRANSCRIPT, f'`{name}` does not begin with "\\n\\nHuman:"')
    speakers, contents = turns[::2], turns[1::2]
    return tuple(
        message(_SPEAKERS[speaker], content.removeprefix(" "))
        for speaker, content in zip(speakers, contents, strict=True)
    )


def _after_shared_start(chosen: Sequence[Message], rejected: Sequence[Message]) -> Pair:
    """The pair in two whole conversations, which may differ in what follows the last question only."""
    if list(chosen) == list(rejected):
        raise Quarantined(Reason.IDENTICAL, "both conversations are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    start = shared
    while start and chosen[start - 1]["role"] == "assistant":
        start -= 1  # both say the same there, to which tools answer differently
    differing = (*chosen[start:], *rejected[start:])
    if any(turn["role"] not in ANSWERING for turn in differing) or shared == min(len(chosen), len(rejected)):
        raise Quarantined(
            Reason.PROMPTS_DIFFER,
            f"`chosen` has {len(chosen)} messages and `rejected` {len(rejected)}; they differ after the first "
            f"{shared}; only what follows the last question may differ",
        )
    return make_pair(chosen[:start], chosen[start:], rejected[start:])


def _repeating_prompt(prompt: Sequence[Message], pair: Pair) -> Pair:
    """`pair`, if its prompt holds every message of the separate `prompt`."""
    if any(turn not in pair.prompt for turn in prompt):
        raise Quarantined(Reason.PROMPTS_DIFFER, "`prompt` is not what the conversations in `chosen` begin with")
    return pair


def _are(row: Row, kind: type | tuple[type, ...], *names: str) -> bool:
    return all(isinstance(row.get(name), kind) for name in names)


_LISTS = (list, tuple, dict)
_ASKED = ("prompt", "instruction", "conversation_a")

FORMATS: dict[str, PreferenceFormat] = {
    "openai": PreferenceFormat(
        "input.messages, preferred_output, non_preferred_output",
        lambda row: "preferred_output" in row and "non_preferred_output" in row,
        _openai,
    ),
    "comparison": PreferenceFormat(
        "instruction or prompt, response1, response2, annotator1.. or label; or conversation_a, conversation_b, winner",
        lambda row: compared_responses(row) is not None and not row.keys().isdisjoint(_ASKED),
        _comparison,
    ),
    "sharegpt": PreferenceFormat(
        "conversations, chosen, rejected",
        lambda row: _are(row, _LISTS, "conversations", "chosen", "rejected"),
        _sharegpt,
    ),
    "alpaca": PreferenceFormat(
        "instruction, input, chosen, rejected",
        lambda row: _are(row, str, "instruction", "chosen", "rejected"),
        _alpaca,
    ),
    "strings": PreferenceFormat(
        "prompt or question, chosen, rejected: text",
        lambda row: _are(row, str, "chosen", "rejected") and (_are(row, str, "prompt") or _are(row, str, "question")),
        _strings,
    ),
    "hh": PreferenceFormat(
        'chosen, rejected: "\\n\\nHuman: ...\\n\\nAssistant: ..."',
        lambda row: _are(row, str, "chosen", "rejected") and _TURN.search(row["chosen"]) is not None,
        _hh,
    ),
    "conversational": PreferenceFormat(
        "prompt, chosen, rejected: messages",
        lambda row: "prompt" in row and _are(row, _LISTS, "chosen", "rejected"),
        _conversational,
    ),
    "implicit_prompt": PreferenceFormat(
        "chosen, rejected: whole conversations",
        lambda row: row.get("prompt") is None and _are(row, _LISTS, "chosen", "rejected"),
        _implicit_prompt,
    ),
}
