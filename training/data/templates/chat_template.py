"""Render chat templates as transformers does, but with a fixed date.

The identity of a template covers its text, its arguments, and its output for a few conversations. The output counts because a
template may, for example, write a special token of the tokenizer by its name.
"""

import json
import re
import string
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from training.contract.config.json_object import JsonObject
from training.contract.errors import TemplateError
from training.contract.identity.fingerprint import fingerprint
from training.data.formats.messages import Message, message
from training.data.templates.render_limits import CHARACTERS, LimitExceeded, check_length, start_timer, stop_timer

CLOCK = "strftime_now"
_OPENING_MARK, _CLOSING_MARK = "opening-probe", "closing-probe"
_PRINTED_PARTS = re.compile(r"""['"]type['"]:""")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_QUESTION, _ANSWER = message("user", "What is 6 x 7?"), message("assistant", "It is 42.\n\nFor sure: naïve 東京 👍")
PROBES: tuple[tuple[Message, ...], ...] = (
    (_QUESTION,),
    (message("system", "Be brief."), _QUESTION),
    (_QUESTION, _ANSWER),
    (message("system", "Be brief."), _QUESTION, _ANSWER),
    (_QUESTION, _ANSWER, message("user", "  And 7 x 6?  "), message("assistant", " <b>42</b> ")),
    (message("system", ""), message("user", "{{ 1 }} {% raw %}"), _ANSWER, message("user", "<think>no</think>")),
)


class ConversationRejected(Exception):
    """The template raised an error for a conversation. `lines_before` lines were put in front of it."""

    def __init__(self, reason: str, lines_before: int) -> None:
        super().__init__(reason)
        self._lines_before = lines_before

    @property
    def line(self) -> int | None:
        """The line of the template with the syntax error or the failing statement; None if Jinja does not know it."""
        if isinstance(self.__cause__, TemplateSyntaxError):
            return self.__cause__.lineno - self._lines_before
        frames = traceback.extract_tb(self.__cause__.__traceback__ if self.__cause__ else None)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>" and frame.lineno is not None]
        return lines[-1] - self._lines_before if lines else None


class Rendered(TypedDict):
    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Renders conversations as `tokenizer.apply_chat_template` does, with `template_kwargs` and a fixed `date`.

    `date` is in ISO format. Without it, a template that reads the clock fails. Some templates of models that take images write
    only content that is a list of parts (Idefics, SmolVLM, Llava). They get such lists.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template_kwargs: JsonObject, date: str | None = None
    ) -> None:
        if not isinstance(tokenizer.chat_template, str) or not tokenizer.chat_template:
            raise TemplateError(
                f"the tokenizer {tokenizer.name_or_path} lacks a chat template; set `tokenization.chat_template` to a .jinja "
                "file, or `tokenization.tokenizer` to a tokenizer that has one",
                "no-chat-template",
            )
        self.text, self.template_kwargs, self.date = tokenizer.chat_template, template_kwargs, date
        # Whether it marks the assistant's turns with {% generation %}.
        self.marks_turns = _GENERATION.search(self.text) is not None
        self._names = {**tokenizer.special_tokens_map, **template_kwargs}
        self._clock = "" if date is None else _clock_at(datetime.fromisoformat(date))
        self._content_in_parts: bool | None = None

    @property
    def _in_parts(self) -> bool:
        """Whether the template writes only content that is a list of parts. The first rendering tries both."""
        if self._content_in_parts is None:
            self._content_in_parts = not self._writes_content(in_parts=False) and self._writes_content(in_parts=True)
        return self._content_in_parts

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        generation_prompt: bool = False,
        clock: bool = False,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the conversation's text and its spans inside {% generation %}.

        `template_kwargs` of the conversation override the template's own. Raises ConversationRejected, TemplateError if the
        template exceeds a limit of render_limits.py, and MemoryError.
        """
        names = {**self._names, **(template_kwargs or {}), **({} if clock else {CLOCK: None})}
        names |= {"tools": tools} if tools else {}
        conversation = [_in_parts(turn) for turn in turns] if self._in_parts else list(turns)
        try:
            start_timer()
            try:
                texts, spans = render_jinja_template(
                    [conversation],
                    chat_template=self._clock + self.text,
                    return_assistant_tokens_mask=self.marks_turns,
                    add_generation_prompt=generation_prompt,
                    **names,
                )
            finally:
                stop_timer()
            if len(texts[0]) > CHARACTERS:
                check_length(texts[0], sum(len(value) for turn in turns for value in turn.values() if value))
        except MemoryError:
            raise
        except LimitExceeded as error:
            raise TemplateError(
                f"the chat template {error} (a conversation of {len(turns)} messages); shorten its loops, or set "
                "`tokenization.chat_template` to another .jinja file",
                "template-limit",
            ) from error
        except Exception as error:  # a template is a program and may raise anything
            raise ConversationRejected(self._reason(error), self._clock.count("\n")) from error
        return {"text": texts[0], "spans": spans[0] if self.marks_turns else []}

    def _writes_content(self, in_parts: bool) -> bool:
        """Return whether the text has the content of user and assistant, and not as a printed list of parts."""
        self._content_in_parts = in_parts
        turns = (message("user", _OPENING_MARK), message("assistant", _CLOSING_MARK))
        try:
            folded = self.render(turns, clock=True)["text"].casefold()
        except ConversationRejected:
            return False
        return all(mark in folded for mark in (_OPENING_MARK, _CLOSING_MARK)) and not _PRINTED_PARTS.search(folded)

    def _reason(self, error: Exception) -> str:
        """Return the text of an error. It is part of fingerprints (see `_probe_text`), so its wording must stay."""
        may_be_clock = self.date is None and isinstance(error, TypeError) and CLOCK in self.text
        advice = "; if it asks for the date of today, set `tokenization.date`" if may_be_clock else ""
        return (str(error) or type(error).__name__) + advice

    def closing(self) -> str:
        """Return the text after the last message of the assistant, from the end of the turn on."""
        return self.render((_QUESTION, message("assistant", _CLOSING_MARK)))["text"].rpartition(_CLOSING_MARK)[2]

    def trained_closing(self) -> str:
        """Return the part of `closing` inside {% generation %}."""
        rendered = self.render((_QUESTION, message("assistant", _CLOSING_MARK)))
        closing_start = rendered["text"].rindex(_CLOSING_MARK) + len(_CLOSING_MARK)
        return "".join(rendered["text"][max(start, closing_start) : end] for start, end in rendered["spans"])

    def fingerprint(self) -> str:
        content = {"text": self.text, "template_kwargs": self.template_kwargs, "probes": probe(self)}
        return fingerprint("chat_template", content | ({"date": self.date} if self.date else {}))


def probe(template: ChatTemplate, clock: bool = False) -> list[str]:
    """Return the text of each probe, or the template's error, without and with a generation prompt."""
    return [_probe_text(template, turns, prompt, clock) for turns in PROBES for prompt in (False, True)]


def _probe_text(template: ChatTemplate, turns: Sequence[Message], generation_prompt: bool, clock: bool) -> str:
    try:
        return template.render(turns, generation_prompt, clock)["text"]
    except ConversationRejected as error:
        return f"rejected: {error}"


def _in_parts(turn: Mapping[str, Any]) -> JsonObject:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def _clock_at(date: datetime) -> str:
    """Return a line that defines `strftime_now` for a date, in Jinja: transformers passes no functions to templates."""
    directives = [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]
    texts = {directive: date.strftime(directive) for directive in directives}
    # Replace "%%" first, so that the letter after it is not read as a directive.
    steps = json.dumps({"%%": "\0", **{d: text for d, text in texts.items() if d != text}, "\0": "%"})
    return (
        f"{{% macro {CLOCK}(format) %}}{{% set now = namespace(text=format) %}}{{% for directive, value in {steps}.items() %}}"
        "{% set now.text = now.text | replace(directive, value) %}{% endfor %}{{ now.text }}{% endmacro %}\n"
    )
