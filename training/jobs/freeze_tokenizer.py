"""The `tokenizer` job: freeze tokenizer, chat template and rules in `spec.json` and `tokenizer/`.

A chat template is a program. The job accepts it only if it renders probe conversations to the same text every time, with and
without a clock. Otherwise the tokens of two days would differ under one fingerprint. Later renderings run without a clock.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from training.contract.errors import TemplateError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import TokenizationDetails
from training.contract.protocol.locations import TokenizerLocations
from training.contract.protocol.settings import TokenizationSettings
from training.contract.protocol.spec_files import SPEC_FILE, TOKENIZER_FOLDER, TokenizationSpec
from training.contract.store.artifact import JobResult
from training.contract.system.child_process import MemoryExceeded, run_in_child
from training.data.templates.chat_template import PROBES, ChatTemplate, ConversationRejected, probe
from training.data.templates.template_probe import Conversation, left_out, marked
from training.data.templates.template_warnings import end_of_turn, template_notes, template_tokens
from training.data.templates.tokenizer import load_tokenizer, save_tokenizer, special_ids, tokenizer_fingerprint
from training.data.templates.tokenizer_source import blaming, read_template, read_tokenizer
from training.job_context import JobContext

_IDENTITY = {"train_on", "max_length", "over_length", "tokenizer_fingerprint", "template_fingerprint"}


def run(context: JobContext[TokenizationSettings, TokenizerLocations]) -> JobResult[TokenizationDetails]:
    """Freeze tokenizer and template.

    Raises TemplateError if they do not suit the settings, DataError if a file no longer has its sha256 in the settings.
    """
    job, events, settings = context.job, context.events, context.settings
    assert context.group.world == 1, "the tokenizer job runs in one process"
    events.phase("loading the tokenizer")
    tokenizer, difference = read_tokenizer(job)
    events.phase("checking the chat template")
    with blaming(job, "chat_template"):
        template = read_template(job, tokenizer)
        name = str(job.locations.chat_template or "the tokenizer's chat template")
        try:
            found = run_in_child(partial(_try_out, template, tokenizer, settings.train_on, name))
        except MemoryExceeded as error:
            raise TemplateError(
                f"{name} needs {error} for a short conversation; shorten its loops, or set `tokenization.chat_template` to "
                "another .jinja file",
                "template-limit",
            ) from error
    spec = TokenizationSpec(
        train_on=settings.train_on,
        max_length=settings.max_length,
        over_length=settings.over_length,
        template_kwargs=template.template_kwargs,
        date=template.date,
        template=template.text,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint=found.fingerprint,
        special_ids=special_ids(tokenizer),
        end_of_turn=found.end_of_turn,
        vocabulary=len(tokenizer),
    )
    notes = [*([difference] if difference else []), *found.notes]
    for note in notes:
        events.note(note)
    _write(job.staging, tokenizer, spec)
    identity = spec.model_dump(include=_IDENTITY)
    details = TokenizationDetails(files=settings.files, notes=tuple(notes), template_tokens=found.tokens)
    return JobResult(fingerprint(AssetName.TOKENIZATION_SPEC.value, identity), details)


@dataclass(frozen=True)
class _TriedOut:
    """The properties of a template that rendering shows."""

    fingerprint: str
    end_of_turn: dict[str, int]
    notes: list[str]
    tokens: dict[str, int]


def _try_out(template: ChatTemplate, tokenizer: PreTrainedTokenizerFast, train_on: str, name: str) -> _TriedOut:
    check_template(template, train_on, name)
    return _TriedOut(
        template.fingerprint(),
        end_of_turn(tokenizer, template),
        list(template_notes(tokenizer, template, train_on)),
        template_tokens(tokenizer, template),
    )


def check_template(template: ChatTemplate, train_on: str, name: str) -> None:
    """Raise TemplateError if the template cannot be used, with `name` as its place.

    It must render a plain question and answer with all their text, independent of clock and chance. If `train_on` is
    `assistant_turns`, it must mark the assistant's turns.
    """
    try:
        template.render(PROBES[0], generation_prompt=True, clock=True)
        spans = template.render(PROBES[2], clock=True)["spans"]
    except ConversationRejected as error:
        place = f"{name}, line {error.line}," if error.line else name
        raise TemplateError(
            f"{place} fails on a question and an answer: {error}; repair it, or set "
            "`tokenization.chat_template` to another .jinja file",
            "template-fails",
        ) from error
    with_clock = probe(template, clock=True)
    if with_clock != probe(template, clock=True):
        raise TemplateError(
            "the chat template gives another text each time, so its tokens cannot be reproduced; remove its random "
            "parts and set `tokenization.chat_template`",
            "template-random",
        )
    if with_clock != probe(template):
        raise TemplateError(
            "the chat template writes today's date (strftime_now), so its tokens would change every day; "
            f"set a fixed date: `tokenization.date: {datetime.now():%Y-%m-%d}`",
            "template-uses-clock",
        )
    if missing := _find_left_out(template):
        raise TemplateError(
            f"the chat template does not write {missing}; set `tokenization.chat_template` to another .jinja file",
            "template-omits-text",
        )
    if train_on == "assistant_turns" and not spans:
        raise TemplateError(
            "`tokenization.train_on: assistant_turns` needs a chat template that marks the assistant's text; put "
            "{% generation %} and {% endgeneration %} around it and set `tokenization.chat_template`, or use "
            "`train_on: last_response`",
            "template-marks-no-turns",
        )


def _find_left_out(template: ChatTemplate) -> str | None:
    """Return a text that the template leaves out of a question and its answer, or None.

    None also if the template rejects the probe's marks, because a template may check the words of a message.
    """
    test = marked(Conversation(list(PROBES[2]), answer=1), in_ids=False)
    try:
        return left_out(template.render(test.copy.turns)["text"], test.marks)
    except ConversationRejected:
        return None


def _write(folder: Path, tokenizer: PreTrainedTokenizerFast, spec: TokenizationSpec) -> None:
    """Write the spec and the tokenizer. Raises TemplateError if the saved tokenizer loads as another one."""
    save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    reloaded = tokenizer_fingerprint(load_tokenizer(folder / TOKENIZER_FOLDER))
    if reloaded != spec.tokenizer_fingerprint:
        raise TemplateError(
            f"the saved tokenizer loads as another one: fingerprint {short(reloaded)}, expected "
            f"{short(spec.tokenizer_fingerprint)}; save it with this version of transformers and set "
            "`tokenization.tokenizer` to that folder",
            "tokenizer-not-saved-exactly",
        )
    content = json.dumps(spec.model_dump(), indent=2, ensure_ascii=False, sort_keys=True, allow_nan=False)
    (folder / SPEC_FILE).write_text(content + "\n", encoding="utf-8")
