"""Chat templates, and the `tokenizer` job that freezes how conversations become tokens.

A template is a program by the tokenizer's publisher. It is accepted if it renders probe conversations to the same text every
time and without looking at the clock: otherwise tokens made today and tomorrow would differ under one fingerprint. All
later renderings run without a clock too.

The job writes `spec.json` and `tokenizer/`: all that tokenizing needs, and nothing else.
"""

import contextlib
import json
import re
import string
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from training.contract.errors import DataError, TemplateError
from training.contract.events import EventWriter
from training.contract.fingerprint import fingerprint, short
from training.contract.job import Job
from training.contract.recipe_files import check_unchanged, tokenizer_files
from training.contract.store import Made
from training.data.conversation import Conversation, left_out, marked
from training.data.messages import Message, message
from training.data.tokenizer import control_ids, load_tokenizer, save_tokenizer, special_ids, tokenizer_fingerprint
from training.distributed import Group

SPEC_FILE, TOKENIZER_FOLDER = "spec.json", "tokenizer"
CLOSING_MARK = "closing-probe"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOCK = "strftime_now"
_SPEC_FIELDS = ("train_on", "max_length", "over_length")

_QUESTION, _ANSWER = message("user", "What is 6 x 7?"), message("assistant", "It is 42.\n\nFor sure: naïve 東京 👍")
PROBES: tuple[tuple[Message, ...], ...] = (
    (_QUESTION,),
    (message("system", "Be brief."), _QUESTION),
    (_QUESTION, _ANSWER),
    (message("system", "Be brief."), _QUESTION, _ANSWER),
    (_QUESTION, _ANSWER, message("user", "  And 7 x 6?  "), message("assistant", " <b>42</b> ")),
    (message("system", ""), message("user", "{{ 1 }} {% raw %}"), _ANSWER, message("user", "<think>no</think>")),
)


class Rejected(Exception):
    """The template, after `lines_before` that are not its own, does not take a conversation; the text is what it says to it."""

    def __init__(self, said: str, lines_before: int = 0) -> None:
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

    `date` is in ISO format. Beside it there is no clock: a template that asks for the time fails.
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
        self._names = {**tokenizer.special_tokens_map, **template_kwargs}
        self._clock = "" if date is None else _clock_at(datetime.fromisoformat(date))

    @property
    def marks_turns(self) -> bool:
        """Whether it marks what the assistant wrote by {% generation %}."""
        return _GENERATION.search(self.text) is not None

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
        names = {**self._names, **(template_kwargs or {}), **({} if clock else {_CLOCK: None})}
        names |= {"tools": tools} if tools else {}
        try:
            texts, spans = render_jinja_template(
                [list(turns)],
                chat_template=self._clock + self.text,
                return_assistant_tokens_mask=self.marks_turns,
                add_generation_prompt=generation_prompt,
                **names,
            )
        except Exception as error:  # a template is a program: it may raise anything, and that is its answer
            raise Rejected(self._said(error), self._clock.count("\n")) from error
        return {"text": texts[0], "spans": spans[0] if self.marks_turns else []}

    def _said(self, error: Exception) -> str:
        unclear = self.date is None and isinstance(error, TypeError) and _CLOCK in self.text
        advice = "; if it asks for the date of today, set `tokenization.date`" if unclear else ""
        return (str(error) or type(error).__name__) + advice

    def closing(self) -> str:
        """What it writes after the last answer of the assistant: the end of the turn, and all that follows."""
        return self.render((_QUESTION, message("assistant", CLOSING_MARK)))["text"].rpartition(CLOSING_MARK)[2]

    def fingerprint(self) -> str:
        content = {"text": self.text, "template_kwargs": self.template_kwargs, "probes": _probe(self)}
        return fingerprint("chat_template", content | ({"date": self.date} if self.date else {}))


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Freeze tokenizer and template. Raises TemplateError where they cannot be used as `job.settings` asks.

    Raises DataError where the files are no longer those whose sha256 `job.settings` holds.
    """
    assert group.world == 1, "freezing a tokenizer is the work of one process"
    events.phase("loading the tokenizer")
    with _blaming(job, "tokenizer"):
        tokenizer = load_tokenizer(Path(job.locations["tokenizer"]))
    events.phase("checking the chat template")
    path = job.locations["chat_template"]
    with _blaming(job, "chat_template"):
        tokenizer.chat_template = _template_text(tokenizer, path)
        _check_files(job)
        template = ChatTemplate(tokenizer, job.settings["template_kwargs"], job.settings.get("date"))
        check_template(template, job.settings["train_on"], path or "the tokenizer's chat template")
    spec = {
        **{name: job.settings[name] for name in _SPEC_FIELDS},
        "template_kwargs": template.template_kwargs,
        "date": template.date,
        "template": template.text,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "template_fingerprint": template.fingerprint(),
        "special_ids": special_ids(tokenizer),
        "end_of_turn": _end_of_turn(tokenizer, template),
        "vocabulary": len(tokenizer),
    }
    for note in _notes(tokenizer, template, spec["end_of_turn"]):
        events.note(note)
    _write(job.staging, tokenizer, spec)
    identity = {name: spec[name] for name in (*_SPEC_FIELDS, "tokenizer_fingerprint", "template_fingerprint")}
    return Made(fingerprint("tokenization_spec", identity), {**spec, "files": job.settings["files"]})


def check_template(template: ChatTemplate, train_on: str, name: str) -> None:
    """Raises TemplateError if it fails on a plain question, or leaves it out, depends on clock or chance, or marks no turns."""
    try:
        template.render(PROBES[0], generation_prompt=True, clock=True)
        spans = template.render(PROBES[2], clock=True)["spans"]
    except Rejected as error:
        place = f"{name}, line {error.line}," if error.line else name
        raise TemplateError(
            f"{place} fails on a question and an answer: {error}; mend it, or set "
            "`tokenization.chat_template` to another .jinja file"
        ) from error
    with_clock = _probe(template, clock=True)
    if with_clock != _probe(template, clock=True):
        raise TemplateError(
            "the chat template gives another text each time, so its tokens cannot be reproduced; take what is random "
            "out of it and set `tokenization.chat_template`"
        )
    if with_clock != _probe(template):
        raise TemplateError(
            "the chat template writes the date of today (strftime_now), so its tokens would change from day to day; "
            f"set the date that it shall write: `tokenization.date: {datetime.now():%Y-%m-%d}`"
        )
    if missing := _left_out(template):
        raise TemplateError(
            f"the chat template does not write {missing}; those of models with images may take content in parts alone, not as "
            "text: set `tokenization.chat_template` to another .jinja file"
        )
    if train_on == "assistant_turns" and not spans:
        raise TemplateError(
            "`tokenization.train_on: assistant_turns` needs a chat template that marks what the assistant writes; put "
            "{% generation %} and {% endgeneration %} around it and set `tokenization.chat_template`, or use "
            "`train_on: last_response`"
        )


def read_spec(folder: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
    return spec


@contextlib.contextmanager
def _blaming(job: Job, file: Literal["tokenizer", "chat_template"]) -> Iterator[None]:
    """Put the place where the recipe names the tokenizer, or the template, in front of a TemplateError."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{job.locations['named'][file]}: {error}") from error


def _template_text(tokenizer: PreTrainedTokenizerFast, path: str | None) -> str | None:
    """The chat template that counts: the recipe's, else the tokenizer's own; of several, the default one."""
    if path is None:
        own = tokenizer.chat_template
        return own.get("default") if isinstance(own, dict) else own
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"`tokenization.chat_template` {path} cannot be read: {error}") from error


def _clock_at(date: datetime) -> str:
    """A line in front of a template, whose clock then stands still; transformers lets no function through to templates."""
    directives = [flag + letter for letter in string.ascii_letters for flag in ("%", "%-")]
    written = {directive: date.strftime(directive) for directive in directives}
    # Two percent signs are put aside first: the letter behind them belongs to no directive.
    steps = json.dumps({"%%": "\0", **{d: w for d, w in written.items() if d != w}, "\0": "%"})
    return (
        f"{{% macro {_CLOCK}(format) %}}{{% set now = namespace(text=format) %}}{{% for directive, value in {steps}.items() %}}"
        "{% set now.text = now.text | replace(directive, value) %}{% endfor %}{{ now.text }}{% endmacro %}\n"
    )


def _check_files(job: Job) -> None:
    """Raise DataError unless the files that were just loaded are exactly those that the derivation names."""
    folder, hashes = Path(job.locations["tokenizer"]), job.settings["files"]
    found = tokenizer_files(folder)
    if differing := sorted(found.keys() ^ hashes.keys()):
        raise DataError(f"{folder} changed while it was read: {', '.join(differing)} came or went; run again")
    for name, path in found.items():
        check_unchanged(path, hashes[name])
    if template := job.locations["chat_template"]:
        check_unchanged(Path(template), job.settings["chat_template"])


def _probe(template: ChatTemplate, clock: bool = False) -> list[str]:
    """The text of each probe, with and without a generation prompt; or the template's error, which counts as its answer."""
    return [_answer(template, turns, prompt, clock) for turns in PROBES for prompt in (False, True)]


def _answer(template: ChatTemplate, turns: Sequence[Message], generation_prompt: bool, clock: bool) -> str:
    try:
        return template.render(turns, generation_prompt, clock)["text"]
    except Rejected as error:
        return f"rejected: {error}"


def _left_out(template: ChatTemplate) -> str | None:
    """What it does not write of a question and its answer; None as well where it refuses other words than it is used to."""
    test = marked(Conversation(list(PROBES[2]), answer=1), in_ids=False)
    try:
        return left_out(template.render(test.copy.turns)["text"], test.marks)
    except Rejected:
        return None


def _end_of_turn(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> dict[str, int]:
    """How often the template writes each control token after an answer, by its spelling."""
    ids = tokenizer(template.closing(), add_special_tokens=False)["input_ids"]
    control = control_ids(tokenizer)
    return dict(Counter(tokenizer.convert_ids_to_tokens(id_) for id_ in ids if id_ in control))


def _notes(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, end_of_turn: dict[str, int]) -> list[str]:
    notes = []
    if not end_of_turn:
        notes.append("the chat template writes no control token after an answer: a model will not learn where to stop")
    text = template.render(PROBES[0], generation_prompt=True)["text"]
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    if adds_bos and not text.startswith(tokenizer.bos_token):
        notes.append(
            "the tokenizer adds a BOS to plain text and the chat template writes none: conversations have none"
        )
    if template.date and _CLOCK not in template.text:
        notes.append("`tokenization.date` changes nothing: the chat template does not ask for the date of today")
    return notes


def _write(folder: Path, tokenizer: PreTrainedTokenizerFast, spec: dict[str, Any]) -> None:
    """Write the spec and the tokenizer, and prove that what was written reads back as the same tokenizer."""
    save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    again = tokenizer_fingerprint(load_tokenizer(folder / TOKENIZER_FOLDER))
    if again != spec["tokenizer_fingerprint"]:
        raise TemplateError(
            f"the tokenizer does not survive being saved ({short(spec['tokenizer_fingerprint'])} became {short(again)}); "
            "save it with this version of transformers and set `tokenization.tokenizer` to that folder"
        )
    content = json.dumps(spec, indent=2, ensure_ascii=False, sort_keys=True, allow_nan=False)
    (folder / SPEC_FILE).write_text(content + "\n", encoding="utf-8")
