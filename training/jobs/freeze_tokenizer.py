"""The `tokenizer` job, which freezes how conversations become tokens: tokenizer, chat template and rules.

A template is a program by the tokenizer's publisher. It is accepted if it renders probe conversations to the same text every
time and without looking at the clock: otherwise tokens made today and tomorrow would differ under one fingerprint. All
later renderings run without a clock too.

The job writes `spec.json` and `tokenizer/`: all that tokenizing needs, and nothing else.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from training.contract.errors import TemplateError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import JobResult
from training.data.templates.chat_template import PROBES, ChatTemplate, ConversationRejected, probe
from training.data.templates.template_probe import Conversation, left_out, marked
from training.data.templates.template_warnings import end_of_turn, template_notes, template_tokens
from training.data.templates.tokenization_spec import SPEC_FILE, TOKENIZER_FOLDER
from training.data.templates.tokenizer import load_tokenizer, save_tokenizer, special_ids, tokenizer_fingerprint
from training.data.templates.tokenizer_source import blaming, read_template, read_tokenizer
from training.distributed import Group

_SPEC_FIELDS = ("train_on", "max_length", "over_length")


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Freeze tokenizer and template. Raises TemplateError where they cannot be used as `job.settings` asks.

    Raises DataError where the files are no longer those whose sha256 `job.settings` holds.
    """
    assert group.world == 1, "freezing a tokenizer is the work of one process"
    events.phase("loading the tokenizer")
    tokenizer, difference = read_tokenizer(job)
    events.phase("checking the chat template")
    with blaming(job, "chat_template"):
        template = read_template(job, tokenizer)
        check_template(
            template, job.settings["train_on"], job.locations["chat_template"] or "the tokenizer's chat template"
        )
    spec = {
        **{name: job.settings[name] for name in _SPEC_FIELDS},
        "template_kwargs": template.template_kwargs,
        "date": template.date,
        "template": template.text,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "template_fingerprint": template.fingerprint(),
        "special_ids": special_ids(tokenizer),
        "end_of_turn": end_of_turn(tokenizer, template),
        "vocabulary": len(tokenizer),
    }
    notes = [*([difference] if difference else []), *template_notes(tokenizer, template, job.settings["train_on"])]
    for note in notes:
        events.note(note)
    _write(job.staging, tokenizer, spec)
    identity = {name: spec[name] for name in (*_SPEC_FIELDS, "tokenizer_fingerprint", "template_fingerprint")}
    of_this_recipe = {
        "files": job.settings["files"],
        "notes": notes,
        "template_tokens": template_tokens(tokenizer, template),
    }
    return JobResult(fingerprint("tokenization_spec", identity), spec | of_this_recipe)


def check_template(template: ChatTemplate, train_on: str, name: str) -> None:
    """Raises TemplateError if it fails on a plain question, or leaves it out, depends on clock or chance, or marks no turns."""
    try:
        template.render(PROBES[0], generation_prompt=True, clock=True)
        spans = template.render(PROBES[2], clock=True)["spans"]
    except ConversationRejected as error:
        place = f"{name}, line {error.line}," if error.line else name
        raise TemplateError(
            f"{place} fails on a question and an answer: {error}; mend it, or set "
            "`tokenization.chat_template` to another .jinja file"
        ) from error
    with_clock = probe(template, clock=True)
    if with_clock != probe(template, clock=True):
        raise TemplateError(
            "the chat template gives another text each time, so its tokens cannot be reproduced; take what is random "
            "out of it and set `tokenization.chat_template`"
        )
    if with_clock != probe(template):
        raise TemplateError(
            "the chat template writes the date of today (strftime_now), so its tokens would change from day to day; "
            f"set the date that it shall write: `tokenization.date: {datetime.now():%Y-%m-%d}`"
        )
    if missing := _left_out(template):
        raise TemplateError(
            f"the chat template does not write {missing}: set `tokenization.chat_template` to another .jinja file"
        )
    if train_on == "assistant_turns" and not spans:
        raise TemplateError(
            "`tokenization.train_on: assistant_turns` needs a chat template that marks what the assistant writes; put "
            "{% generation %} and {% endgeneration %} around it and set `tokenization.chat_template`, or use "
            "`train_on: last_response`"
        )


def _left_out(template: ChatTemplate) -> str | None:
    """What it does not write of a question and its answer; None too where it refuses them, as they are not in its own words."""
    test = marked(Conversation(list(PROBES[2]), answer=1), in_ids=False)
    try:
        return left_out(template.render(test.copy.turns)["text"], test.marks)
    except ConversationRejected:
        return None


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
