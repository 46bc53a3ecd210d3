"""The formats preference data is published in, each a pure function from a row to a pair.

    conversational   prompt, chosen, rejected: messages (or a prompt of plain text before message lists)
    implicit_prompt  chosen, rejected: whole conversations; what they share at the start is the prompt
    strings          prompt (or question), chosen, rejected: plain text; the prompt may be messages
    sharegpt         conversations, chosen, rejected: messages spelled {from, value}
    hh               chosen, rejected: transcripts "\\n\\nHuman: ...\\n\\nAssistant: ...", or the ends of one in `prompt`
    alpaca           instruction, input, chosen, rejected: plain text
    openai           input.messages, preferred_output, non_preferred_output
    messages         messages (the prompt), chosen, rejected: an answer each, as messages or plain text (axolotl)
    ms_swift         messages, which end with the chosen answer; rejected_response, or rejected_messages from the start
    comparison       two responses and labels that say which is better (ranked_responses.py)

A field that is in a column of another name is moved there before (columns.py).
In all of them a row may also have the fields `system`, for a system message in front, `tools` and `chat_template_kwargs`
(tools.py). A row that does not fit its format, or has what no format reads, such as images, raises `Quarantined`.
Formats are recognized by the fields of the first rows (reading/format_detection.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from training.data.formats.messages import (
    ANSWERING,
    INSTRUCTING,
    SHAREGPT_STYLE,
    Message,
    Pair,
    make_pair,
    message,
    messages_of,
    pair_of_conversations,
    repeating_prompt,
)
from training.data.formats.quarantine import (
    Quarantined,
    QuarantineReason,
    Row,
    check_supported,
    clean_text,
    field_of,
    optional_text,
    text_of,
)
from training.data.formats.ranked_responses import names_a_verdict, response_layout, winner_first
from training.data.formats.tools import template_kwargs_text, tools_text
from training.data.formats.transcripts import is_transcript, transcript_of

_ASKED = ("prompt", "question", "instruction")
# What a trainer would pass to the template besides the messages, or show the model: it is part of the conversation.
_UNSUPPORTED_FIELDS = ("functions", "image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class PreferenceFormat:
    """`fits` looks at a row's fields only; `read` raises Quarantined where their content is wrong."""

    fields: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], Pair]

    def convert(self, row: Row) -> Pair:
        """The pair in a row, with the system prompt, tools and template arguments that may come with it. Raises Quarantined."""
        check_supported(row, _UNSUPPORTED_FIELDS, "row")
        pair = self.read(row)
        tools = pair.tools or tools_text(row.get("tools"), "tools")
        template_kwargs = template_kwargs_text(row.get("chat_template_kwargs"), "chat_template_kwargs")
        return replace(pair, prompt=_with_system(row, pair.prompt), tools=tools, chat_template_kwargs=template_kwargs)


def _sharegpt(row: Row) -> Pair:
    prompt, chosen, rejected = (
        messages_of(row, name, SHAREGPT_STYLE) for name in ("conversations", "chosen", "rejected")
    )
    return make_pair(prompt, chosen, rejected)


def _hh(row: Row) -> Pair:
    return pair_of_conversations(transcript_of(row, "chosen"), transcript_of(row, "rejected"))


def _openai(row: Row) -> Pair:
    holder = field_of(row, "input")
    if not isinstance(holder, dict):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`input` is {type(holder).__name__}, expected an object with `messages`"
        )
    check_supported(holder, ("functions",), "input")
    chosen, rejected = messages_of(row, "preferred_output"), messages_of(row, "non_preferred_output")
    pair = make_pair(messages_of(holder, "messages"), chosen, rejected)
    return replace(pair, tools=tools_text(holder.get("tools"), "input.tools"))


def _comparison(row: Row) -> Pair:
    sides = winner_first(row)
    return (_messages if _are(row, _LISTS, *sides) else _texts)(row, _ASKED, *sides)


def _compares(row: Row) -> bool:
    """Whether a row has two responses, with what they answer in them or beside them, and no pair that says which is chosen."""
    layout = response_layout(row)
    if layout is None or (row.keys().isdisjoint(_ASKED) and not _are(row, _LISTS, layout.first, layout.second)):
        return False
    return row.get("chosen") is None or row.get("rejected") is None or names_a_verdict(row["chosen"], layout)


def _messages(row: Row, asked: Sequence[str], better: str = "chosen", worse: str = "rejected") -> Pair:
    """The pair of two answers in messages to what stands in one of the fields `asked`, or else begins both of them."""
    prompt, chosen, rejected = _prompt(row, asked), messages_of(row, better), messages_of(row, worse)
    if not prompt:
        return pair_of_conversations(chosen, rejected)
    if chosen and chosen[0]["role"] not in ANSWERING:  # whole conversations beside their prompt, as in UltraFeedback
        return repeating_prompt(prompt, "prompt", pair_of_conversations(chosen, rejected))
    return make_pair(prompt, chosen, rejected)


def _texts(row: Row, asked: Sequence[str], better: str = "chosen", worse: str = "rejected") -> Pair:
    """The pair of two answers in plain text to what stands in one of the fields `asked`, after the turns in `history`."""
    prompt = _prompt(row, asked)
    if not prompt:
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"`{asked[0]}` is missing")
    chosen, rejected = (message("assistant", text_of(row, side)) for side in (better, worse))
    return make_pair((*_history(row), *prompt), (chosen,), (rejected,))


def _beside_messages(row: Row) -> Pair:
    """The pair of two answers to the prompt in `messages`; or of two whole conversations that begin with it."""
    prompt, chosen, rejected = messages_of(row, "messages"), _answer(row, "chosen"), _answer(row, "rejected")
    if any(turn["role"] not in ANSWERING for turn in chosen):
        pair = pair_of_conversations(chosen, rejected)
        return pair if prompt == chosen else repeating_prompt(prompt, "messages", pair)
    if chosen and prompt[-len(chosen) :] == chosen:  # the chosen conversation
        prompt = prompt[: -len(chosen)]
    elif prompt and prompt[-1]["role"] == "assistant":
        raise Quarantined(
            QuarantineReason.PROMPT_ROLE,
            "`messages` ends with an answer of the assistant, expected the prompt or the chosen answer",
        )
    return make_pair(prompt, chosen, rejected)


def _ms_swift(row: Row) -> Pair:
    """The pair of the answer at the end of `messages` and another one, which may come with all that is before it."""
    whole, of_answer, of_all = messages_of(row, "messages"), "rejected_response", "rejected_messages"
    if row.get(of_all) is not None and row.get(of_answer) is not None:
        raise Quarantined(
            QuarantineReason.UNSUPPORTED_FIELD, f"the row has `{of_answer}` and `{of_all}`, expected one of them"
        )
    if whole and whole[-1]["role"] != "assistant":
        last = whole[-1]["role"]
        raise Quarantined(
            QuarantineReason.RESPONSE_ROLE,
            f"`messages` ends with a message from the {last}, expected the assistant's chosen answer",
        )
    if row.get(of_all) is not None:
        return pair_of_conversations(whole, messages_of(row, of_all))
    return make_pair(whole[:-1], whole[-1:], _answer(row, of_answer))


def _answer(row: Row, name: str) -> tuple[Message, ...]:
    """The answer in a field: plain text or messages."""
    return (message("assistant", text_of(row, name)),) if _are(row, str, name) else messages_of(row, name)


def _prompt(row: Row, asked: Sequence[str]) -> tuple[Message, ...]:
    """The turns in the first of the fields `asked` that the row has, which holds messages or text; none without one."""
    name = next((name for name in asked if row.get(name) is not None), None)
    if name is None:
        return ()
    if _are(row, _LISTS, name):
        return messages_of(row, name)
    texts = (text_of(row, name), optional_text(row, "input") if name == "instruction" else "")
    return (message("user", "\n\n".join(text for text in texts if text.strip())),)


def _history(row: Row) -> tuple[Message, ...]:
    """Earlier turns: a list of [question, answer]."""
    given, turns = row.get("history") or (), list[Message]()
    if not isinstance(given, list | tuple):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE,
            f"`history` is {type(given).__name__}, expected a list of earlier turns; if it is something else in this data, set "
            "`columns: {history: null}`",
        )
    for index, turn in enumerate(given):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise Quarantined(QuarantineReason.WRONG_TYPE, f"`history[{index}]` is not a [question, answer]")
        for role, content in zip(("user", "assistant"), turn, strict=True):
            turns.append(message(role, clean_text(content, f"history[{index}]")))
    return tuple(turns)


def _with_system(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """`turns`, after the row's `system` prompt if it has one and they do not begin with it."""
    first = message("system", optional_text(row, "system"))
    said = first["content"].strip()
    is_there = turns[0]["role"] in INSTRUCTING and turns[0]["content"].strip() == said
    return (first, *turns) if said and not is_there else turns


def _is_answer(value: Any) -> bool:
    """Whether `value` is plain text, or messages none of which is the user's."""
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list | tuple):
        return isinstance(value, str)
    return bool(turns) and all(isinstance(turn, Mapping) and turn.get("role") in ANSWERING for turn in turns)


def _are(row: Row, kind: type | tuple[type, ...], *names: str) -> bool:
    return all(isinstance(row.get(name), kind) for name in names)


_LISTS = (list, tuple, dict)
_TRANSCRIPTS = ("chosen", "prompt")
FORMATS: dict[str, PreferenceFormat] = {
    "openai": PreferenceFormat(
        "input.messages, preferred_output, non_preferred_output",
        lambda row: "preferred_output" in row and "non_preferred_output" in row,
        _openai,
    ),
    "comparison": PreferenceFormat(
        "prompt, question or instruction, response1, response2, label; or conversation_a, conversation_b, label",
        _compares,
        _comparison,
    ),
    "sharegpt": PreferenceFormat(
        "conversations, chosen, rejected",
        lambda row: _are(row, _LISTS, "conversations", "chosen", "rejected"),
        _sharegpt,
    ),
    "hh": PreferenceFormat(
        'chosen, rejected: "\\n\\nHuman: ...\\n\\nAssistant: ...", or the ends of one in `prompt`',
        lambda row: _are(row, str, "chosen", "rejected") and any(is_transcript(row.get(name)) for name in _TRANSCRIPTS),
        _hh,
    ),
    "alpaca": PreferenceFormat(
        "instruction, input, chosen, rejected",
        lambda row: _are(row, str, "instruction", "chosen", "rejected"),
        partial(_texts, asked=("instruction",)),
    ),
    "strings": PreferenceFormat(
        "prompt or question, chosen, rejected: text",
        lambda row: (
            _are(row, str, "chosen", "rejected")
            and (_are(row, (str, *_LISTS), "prompt") or _are(row, (str, *_LISTS), "question"))
        ),
        partial(_texts, asked=("prompt", "question")),
    ),
    "messages": PreferenceFormat(
        "messages: the prompt; chosen, rejected: an answer each, as messages or text",
        lambda row: (
            row.get("prompt") is None
            and _are(row, _LISTS, "messages")
            and all(_is_answer(row.get(name)) for name in ("chosen", "rejected"))
        ),
        _beside_messages,
    ),
    "conversational": PreferenceFormat(
        "prompt, chosen, rejected: messages",
        lambda row: "prompt" in row and _are(row, _LISTS, "chosen", "rejected"),
        partial(_messages, asked=("prompt",)),
    ),
    "implicit_prompt": PreferenceFormat(
        "chosen, rejected: whole conversations",
        lambda row: row.get("prompt") is None and _are(row, _LISTS, "chosen", "rejected"),
        partial(_messages, asked=()),
    ),
    "ms_swift": PreferenceFormat(
        "messages: whole conversations, each with the chosen answer; rejected_response, or rejected_messages: a whole one",
        lambda row: (
            _are(row, _LISTS, "messages")
            and (_are(row, (str, *_LISTS), "rejected_response") or _are(row, _LISTS, "rejected_messages"))
        ),
        _ms_swift,
    ),
}
