"""The tokenizer and the chat template that a recipe names, read from copies of exactly the files in the key."""

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from training.contract.errors import DataError, TemplateError
from training.contract.identity.tokenizer_files import copy_tokenizer
from training.contract.protocol.job import Job
from training.data.templates.chat_template import ChatTemplate
from training.data.templates.tokenizer import difference_to_file, load_tokenizer

_SETTINGS = ("files", "config")


@contextlib.contextmanager
def blaming(job: Job, file: Literal["tokenizer", "chat_template"]) -> Iterator[None]:
    """Put the place where the recipe names the tokenizer, or the template, in front of a TemplateError."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{job.locations['named'][file]}: {error}") from error


def read_tokenizer(job: Job) -> tuple[PreTrainedTokenizerFast, str | None]:
    """Return the tokenizer of `job` with its chat template, and how it differs from its tokenizer.json, in words, if it does.

    `job.settings` holds `files`, the sha256 of each file of the tokenizer, `config`, the fields of the config.json beside
    them, and `chat_template`, the sha256 of the recipe's template. Raises TemplateError if one cannot be loaded, DataError if
    the files are others by now.
    """
    folder = Path(job.locations["tokenizer"])
    with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
        copy = Path(scratch)
        copy_tokenizer(folder, copy, *(job.settings[name] for name in _SETTINGS))
        with blaming(job, "tokenizer"):
            tokenizer = load_tokenizer(copy, called=folder)
        with blaming(job, "chat_template"):
            tokenizer.chat_template = _template_text(job, tokenizer, copy)
        return tokenizer, difference_to_file(tokenizer, copy / "tokenizer.json")


def read_template(job: Job, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    """Return the template that `read_tokenizer` gave `tokenizer`, with the arguments and the date of `job.settings`."""
    return ChatTemplate(tokenizer, job.settings["template_kwargs"], job.settings.get("date"))


def _template_text(job: Job, tokenizer: PreTrainedTokenizerFast, copy: Path) -> str | None:
    """The chat template that counts: the recipe's, else the tokenizer's own; of several, the default one."""
    path = job.locations["chat_template"]
    if path is None:
        own = tokenizer.chat_template or _template_of_processor(copy / "chat_template.json")
        return own.get("default") if isinstance(own, dict) else own
    try:
        content = Path(path).read_bytes()
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()  # with "\n" as the end of every line
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"`tokenization.chat_template` {path} cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != job.settings["chat_template"]:
        raise DataError(f"{path} changed while it was read; run again once it is written")
    if not text:
        raise TemplateError(f"{path} is empty; expected a Jinja template, or null for the tokenizer's own")
    return text


def _template_of_processor(file: Path) -> str | None:
    """Models that take images may have theirs in a file that transformers reads for their processor alone."""
    if not file.is_file():
        return None
    try:
        text: Any = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TemplateError(
            f'{file.name} cannot be read: {type(error).__name__}: {error}; expected {{"chat_template": ...}}, or set '
            "`tokenization.chat_template` to a .jinja file"
        ) from error
    return text if isinstance(text, str) else None
