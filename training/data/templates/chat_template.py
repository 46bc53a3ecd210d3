"""Chat templates as transformers renders them, but on a day that stands still.

What a template is, is its text, its arguments and what it writes of a few conversations: a name of a special token in it, for
example, stands for what the tokenizer has there.
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

from training.contract.errors import TemplateError
from training.contract.identity.fingerprint import fingerprint
from training.data.formats.messages import Message, message

CLOCK = "strftime_now"
_OPENING_MARK, _CLOSING_MARK = "opening-probe", "closing-probe"
_SPELLED_OUT = re.compile(r"""['"]type['"]:""")
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
    """The template, before which stand `lines_before` that are not its own, does not take a conversation, and `said` why."""

    def __init__(self, said: str, lines_before: int) -> None:
        super().__init__(said)
        self._lines_before = lines_before

    @property
    def line(self) -> int | None:
        """The template's own line, where Jinja knows it: of a slip of syntax, or where a statement failed."""
        if isinstance(self.__cause__, TemplateSyntaxError):
            return self.__cause__.lineno - self._lines_before
        frames = traceback.extract_tb(self.__cause__.__traceback__ if self.__cause__ else None)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>" and frame.lineno is not None]
        return lines[-1] - self._lines_before if lines else None


class Rendered(TypedDict):
    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Renders conversations as `tokenizer.apply_chat_template` does, with `template_kwargs`, and as on `date`.

    `date` is in ISO format. Beside it there is no clock: a template that asks for the time fails. Templates of models that take
    images may write what is said only where it is a list of parts (Idefics, SmolVLM, Llava): they get it so.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template_kwargs: dict[str, Any], date: str | None = None
    ) -> None:
        if not isinstance(tokenizer.chat_template, str) or not tokenizer.chat_template:
            raise TemplateError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template; set `tokenization.chat_template` to a .jinja "
                "file, or `tokenization.tokenizer` to a tokenizer that has one"
            )
        self.text, self.template_kwargs, self.date = tokenizer.chat_template, template_kwargs, date
        # Whether it marks what the assistant wrote by {% generation %}.
        self.marks_turns = _GENERATION.search(self.text) is not None
        self._names = {**tokenizer.special_tokens_map, **template_kwargs}
        self._clock = "" if date is None else _clock_at(datetime.fromisoformat(date))
        self._in_parts = not self._writes(in_parts=False) and self._writes(in_parts=True)

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        generation_prompt: bool = False,
        clock: bool = False,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The conversation's text, and the spans of it inside {% generation %}. Raises Rejected.

        `template_kwargs` of the conversation go before those of all.
        """
        names = {**self._names, **(template_kwargs or {}), **({} if clock else {CLOCK: None})}
        names |= {"tools": tools} if tools else {}
        try:
            texts, spans = render_jinja_template(
                [[_in_parts(turn) for turn in turns] if self._in_parts else list(turns)],
                chat_template=self._clock + self.text,
                return_assistant_tokens_mask=self.marks_turns,
                add_generation_prompt=generation_prompt,
                **names,
            )
        except Exception as error:  # a template is a program: it may raise anything, and that is its answer
            raise ConversationRejected(self._said(error), self._clock.count("\n")) from error
        return {"text": texts[0], "spans": spans[0] if self.marks_turns else []}

    def _writes(self, in_parts: bool) -> bool:
        """Whether what user and assistant say is in its text, and not as a list that is spelled out."""
        self._in_parts = in_parts
        turns = (message("user", _OPENING_MARK), message("assistant", _CLOSING_MARK))
        try:
            folded = self.render(turns, clock=True)["text"].casefold()
        except ConversationRejected:
            return False
        return all(mark in folded for mark in (_OPENING_MARK, _CLOSING_MARK)) and not _SPELLED_OUT.search(folded)

    def _said(self, error: Exception) -> str:
        unclear = self.date is None and isinstance(error, TypeError) and CLOCK in self.text
        advice = "; if it asks for the date of today, set `tokenization.date`" if unclear else ""
        return (str(error) or type(error).__name__) + advice

    def closing(self) -> str:
        """What it writes after the last answer of the assistant: the end of the turn, and all that follows."""
        return self.render((_QUESTION, message("assistant", _CLOSING_MARK)))["text"].rpartition(_CLOSING_MARK)[2]

    def trained_closing(self) -> str:
        """The part of `closing` that is inside {% generation %}."""
        rendered = self.render((_QUESTION, message("assistant", _CLOSING_MARK)))
        begins = rendered["text"].rindex(_CLOSING_MARK) + len(_CLOSING_MARK)
        return "".join(rendered["text"][max(start, begins) : end] for start, end in rendered["spans"])

    def fingerprint(self) -> str:
        content = {"text": self.text, "template_kwargs": self.template_kwargs, "probes": probe(self)}
        return fingerprint("chat_template", content | ({"date": self.date} if self.date else {}))


def probe(template: ChatTemplate, clock: bool = False) -> list[str]:
    """The text of each probe, with and without a generation prompt; or the template's error, which counts as its answer."""
    return [_answer(template, turns, prompt, clock) for turns in PROBES for prompt in (False, True)]


def _answer(template: ChatTemplate, turns: Sequence[Message], generation_prompt: bool, clock: bool) -> str:
    try:
        return template.render(turns, generation_prompt, clock)["text"]
    except ConversationRejected as error:
        return f"rejected: {error}"


def _in_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def _clock_at(date: datetime) -> str:
    """A line in front of a template, whose clock then stands still; transformers lets no function through to templates."""
    directives = [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]
    written = {directive: date.strftime(directive) for directive in directives}
    # Two percent signs are put aside first: the letter behind them belongs to no directive.
    steps = json.dumps({"%%": "\0", **{d: w for d, w in written.items() if d != w}, "\0": "%"})
    return (
        f"{{% macro {CLOCK}(format) %}}{{% set now = namespace(text=format) %}}{{% for directive, value in {steps}.items() %}}"
        "{% set now.text = now.text | replace(directive, value) %}{% endfor %}{{ now.text }}{% endmacro %}\n"
    )
