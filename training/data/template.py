"""The `tokenizer` job, which freezes how conversations become tokens: tokenizer, chat template and rules.

A template is a program by the tokenizer's publisher. It is accepted if it renders probe conversations to the same text every
time and without looking at the clock: otherwise tokens made today and tomorrow would differ under one fingerprint. All
later renderings run without a clock too.

The job writes `spec.json` and `tokenizer/`: all that tokenizing needs, and nothing else.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from training.contract.errors import DataError, TemplateError
from training.contract.events import EventWriter
from training.contract.fingerprint import fingerprint, short
from training.contract.job import Job
from training.contract.recipe_files import check_unchanged, tokenizer_files
from training.contract.store import Made
from training.data.chat_template import CLOCK, PROBES, ChatTemplate, Rejected, probe
from training.data.conversation import Conversation, left_out, marked
from training.data.tokenizer import control_ids, load_tokenizer, save_tokenizer, special_ids, tokenizer_fingerprint
from training.distributed import Group

SPEC_FILE, TOKENIZER_FOLDER = "spec.json", "tokenizer"
_SPEC_FIELDS = ("train_on", "max_length", "over_length")


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
        tokenizer.chat_template = _template_text(tokenizer, Path(job.locations["tokenizer"]), path)
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


def _template_text(tokenizer: PreTrainedTokenizerFast, folder: Path, path: str | None) -> str | None:
    """The chat template that counts: the recipe's, else the tokenizer's own in `folder`; of several, the default one."""
    if path is None:
        own = tokenizer.chat_template or _template_of_processor(folder / "chat_template.json")
        return own.get("default") if isinstance(own, dict) else own
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"`tokenization.chat_template` {path} cannot be read: {error}") from error
    if not text:
        raise TemplateError(f"{path} is empty; expected a Jinja template, or null for the tokenizer's own")
    return text


def _template_of_processor(file: Path) -> str | None:
    """Models that take images may have theirs in a file that transformers reads for their processor alone."""
    if not file.is_file():
        return None
    try:
        text = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TemplateError(
            f'{file} cannot be read: {type(error).__name__}: {error}; expected {{"chat_template": ...}}, or set '
            "`tokenization.chat_template` to a .jinja file"
        ) from error
    return text if isinstance(text, str) else None


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


def _left_out(template: ChatTemplate) -> str | None:
    """What it does not write of a question and its answer; None too where it refuses them, as they are not in its own words."""
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
    if template.date and CLOCK not in template.text:
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
