"""The formats of preference data. Each is a pure function from a row to a pair.

    conversational   prompt, chosen, rejected: messages (or a prompt of plain text before message lists)
    implicit_prompt  chosen, rejected: conversations; their shared start is the prompt
    strings          prompt (or question), chosen, rejected: plain text; the prompt may be messages
    sharegpt         conversations, chosen, rejected: messages {from, value}
    hh               chosen, rejected: transcripts "\\n\\nHuman: ...\\n\\nAssistant: ...", or the ends of one in `prompt`
    alpaca           instruction, input, chosen, rejected: plain text
    openai           input.messages, preferred_output, non_preferred_output
    messages         messages (the prompt), chosen, rejected: one response each, as messages or plain text (axolotl)
    ms_swift         messages (they end with the chosen response); rejected_response, or rejected_messages from the start
    comparison       two responses with labels for the better one (ranked_responses.py)

Rows of all formats may also have `system`, a system message in front, `tools` and `chat_template_kwargs` (tools.py).
A row raises Quarantined if it does not fit its format, or has data that no format reads, such as images.
Columns are renamed before (columns.py). Formats are detected by the fields of the first rows (reading/format_detection.py).
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

_PROMPT_FIELDS = ("prompt", "question", "instruction")
# Other trainers pass these fields to the template or the model, so they are part of the conversation.
_UNSUPPORTED_FIELDS = ("functions", "image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class PreferenceFormat:
    """A format. `fits` checks only the fields of a row; `read` raises Quarantined if their content is wrong."""

    fields: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], Pair]

    def convert(self, row: Row) -> Pair:
        """Return the pair of a row, with its system message, tools and template arguments. Raises Quarantined."""
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
    request = field_of(row, "input")
    if not isinstance(request, dict):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE, f"`input` is {type(request).__name__}, expected an object with `messages`"
        )
    check_supported(request, ("functions",), "input")
    chosen, rejected = messages_of(row, "preferred_output"), messages_of(row, "non_preferred_output")
    pair = make_pair(messages_of(request, "messages"), chosen, rejected)
    return replace(pair, tools=tools_text(request.get("tools"), "input.tools"))


def _comparison(row: Row) -> Pair:
    sides = winner_first(row)
    return (_messages if _are(row, _LISTS, *sides) else _texts)(row, _PROMPT_FIELDS, *sides)


def _fits_comparison(row: Row) -> bool:
    """Return whether a row has two responses with their prompt, in them or beside them, but not `chosen` and `rejected`."""
    layout = response_layout(row)
    if layout is None or (row.keys().isdisjoint(_PROMPT_FIELDS) and not _are(row, _LISTS, layout.first, layout.second)):
        return False
    return row.get("chosen") is None or row.get("rejected") is None or names_a_verdict(row["chosen"], layout)


def _messages(row: Row, prompt_fields: Sequence[str], better: str = "chosen", worse: str = "rejected") -> Pair:
    """Return the pair of two responses as messages. The prompt is in one of `prompt_fields`, or begins both responses."""
    prompt, chosen, rejected = _prompt(row, prompt_fields), messages_of(row, better), messages_of(row, worse)
    if not prompt:
        return pair_of_conversations(chosen, rejected)
    if chosen and chosen[0]["role"] not in ANSWERING:  # conversations beside their prompt, as in UltraFeedback
        return repeating_prompt(prompt, "prompt", pair_of_conversations(chosen, rejected))
    return make_pair(prompt, chosen, rejected)


def _texts(row: Row, prompt_fields: Sequence[str], better: str = "chosen", worse: str = "rejected") -> Pair:
    """Return the pair of two plain texts. The prompt is in one of `prompt_fields`, after the turns in `history`."""
    prompt = _prompt(row, prompt_fields)
    if not prompt:
        raise Quarantined(QuarantineReason.MISSING_FIELD, f"`{prompt_fields[0]}` is missing")
    chosen, rejected = (message("assistant", text_of(row, side)) for side in (better, worse))
    return make_pair((*_history(row), *prompt), (chosen,), (rejected,))


def _messages_format(row: Row) -> Pair:
    """Return the pair of two responses to the prompt in `messages`, or of two conversations that begin with it."""
    prompt, chosen, rejected = messages_of(row, "messages"), _response(row, "chosen"), _response(row, "rejected")
    if any(turn["role"] not in ANSWERING for turn in chosen):
        pair = pair_of_conversations(chosen, rejected)
        return pair if prompt == chosen else repeating_prompt(prompt, "messages", pair)
    if chosen and prompt[-len(chosen) :] == chosen:  # the chosen conversation
        prompt = prompt[: -len(chosen)]
    elif prompt and prompt[-1]["role"] == "assistant":
        raise Quarantined(
            QuarantineReason.PROMPT_ROLE,
            "`messages` ends with a message of the assistant, expected the prompt or the chosen response",
        )
    return make_pair(prompt, chosen, rejected)


def _ms_swift(row: Row) -> Pair:
    """Return the pair of the response at the end of `messages` and another response, or another conversation."""
    chosen, response, conversation = messages_of(row, "messages"), "rejected_response", "rejected_messages"
    if row.get(conversation) is not None and row.get(response) is not None:
        raise Quarantined(
            QuarantineReason.UNSUPPORTED_FIELD, f"the row has `{response}` and `{conversation}`, expected one of them"
        )
    if chosen and chosen[-1]["role"] != "assistant":
        last = chosen[-1]["role"]
        raise Quarantined(
            QuarantineReason.RESPONSE_ROLE,
            f"`messages` ends with a message from the {last}, expected the assistant's chosen response",
        )
    if row.get(conversation) is not None:
        return pair_of_conversations(chosen, messages_of(row, conversation))
    return make_pair(chosen[:-1], chosen[-1:], _response(row, response))


def _response(row: Row, name: str) -> tuple[Message, ...]:
    """Return the response in a field, which holds plain text or messages."""
    return (message("assistant", text_of(row, name)),) if _are(row, str, name) else messages_of(row, name)


def _prompt(row: Row, prompt_fields: Sequence[str]) -> tuple[Message, ...]:
    """Return the turns in the first of `prompt_fields` that the row has. The field holds messages or text."""
    name = next((name for name in prompt_fields if row.get(name) is not None), None)
    if name is None:
        return ()
    if _are(row, _LISTS, name):
        return messages_of(row, name)
    texts = (text_of(row, name), optional_text(row, "input") if name == "instruction" else "")
    return (message("user", "\n\n".join(text for text in texts if text.strip())),)


def _history(row: Row) -> tuple[Message, ...]:
    """Return the earlier turns: `history` is a list of [question, answer]."""
    history, turns = row.get("history") or (), list[Message]()
    if not isinstance(history, list | tuple):
        raise Quarantined(
            QuarantineReason.WRONG_TYPE,
            f"`history` is {type(history).__name__}, expected a list of earlier turns; if it has another meaning here, set "
            "`columns: {history: null}`",
        )
    for index, exchange in enumerate(history):
        if not isinstance(exchange, list | tuple) or len(exchange) != 2:
            raise Quarantined(QuarantineReason.WRONG_TYPE, f"`history[{index}]` is not a [question, answer]")
        for role, content in zip(("user", "assistant"), exchange, strict=True):
            turns.append(message(role, clean_text(content, f"history[{index}]")))
    return tuple(turns)


def _with_system(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """Put the row's `system` message in front of `turns`, unless they begin with it."""
    first = message("system", optional_text(row, "system"))
    text = first["content"].strip()
    is_there = turns[0]["role"] in INSTRUCTING and turns[0]["content"].strip() == text
    return (first, *turns) if text and not is_there else turns


def _is_response(value: Any) -> bool:
    """Return whether `value` is plain text, or messages of assistant and tools only."""
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
        _fits_comparison,
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
        partial(_texts, prompt_fields=("instruction",)),
    ),
    "strings": PreferenceFormat(
        "prompt or question, chosen, rejected: text",
        lambda row: (
            _are(row, str, "chosen", "rejected")
            and (_are(row, (str, *_LISTS), "prompt") or _are(row, (str, *_LISTS), "question"))
        ),
        partial(_texts, prompt_fields=("prompt", "question")),
    ),
    "messages": PreferenceFormat(
        "messages: the prompt; chosen, rejected: one response each, as messages or text",
        lambda row: (
            row.get("prompt") is None
            and _are(row, _LISTS, "messages")
            and all(_is_response(row.get(name)) for name in ("chosen", "rejected"))
        ),
        _messages_format,
    ),
    "conversational": PreferenceFormat(
        "prompt, chosen, rejected: messages",
        lambda row: "prompt" in row and _are(row, _LISTS, "chosen", "rejected"),
        partial(_messages, prompt_fields=("prompt",)),
    ),
    "implicit_prompt": PreferenceFormat(
        "chosen, rejected: conversations",
        lambda row: row.get("prompt") is None and _are(row, _LISTS, "chosen", "rejected"),
        partial(_messages, prompt_fields=()),
    ),
    "ms_swift": PreferenceFormat(
        "messages: a conversation that ends with the chosen response; rejected_response, or rejected_messages: a conversation",
        lambda row: (
            _are(row, _LISTS, "messages")
            and (_are(row, (str, *_LISTS), "rejected_response") or _are(row, _LISTS, "rejected_messages"))
        ),
        _ms_swift,
    ),
}
