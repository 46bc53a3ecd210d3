"""Read the tokenizer and the chat template of a recipe, from copies of exactly the files in the key."""

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from training.contract.config.key_settings import Settings
from training.contract.errors import DataError, TemplateError
from training.contract.identity.tokenizer_files import copy_tokenizer
from training.contract.protocol.job import Job
from training.contract.protocol.locations import ReleaseFilesLocations, TokenizerLocations
from training.contract.protocol.settings import ReleaseFilesSettings, TokenizationSettings
from training.data.templates.chat_template import ChatTemplate
from training.data.templates.tokenizer import difference_to_file, load_tokenizer

TokenizerJob = Job[TokenizationSettings, TokenizerLocations] | Job[ReleaseFilesSettings, ReleaseFilesLocations]


@contextlib.contextmanager
def blaming(job: Job[Settings, TokenizerLocations], file: Literal["tokenizer", "chat_template"]) -> Iterator[None]:
    """Prefix a TemplateError with the recipe field that names the tokenizer or the template."""
    named = job.locations.named
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{named.tokenizer if file == 'tokenizer' else named.chat_template}: {error}") from error


def read_tokenizer(job: TokenizerJob) -> tuple[PreTrainedTokenizerFast, str | None]:
    """Return the tokenizer of `job` with its chat template, and a note if it differs from its tokenizer.json.

    Raises TemplateError if one cannot be loaded, DataError if a file no longer has the sha256 in the job's settings.
    """
    folder, settings = job.locations.tokenizer, job.settings
    with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
        copy = Path(scratch)
        copy_tokenizer(folder, copy, settings.files, settings.config)
        with blaming(job, "tokenizer"):
            tokenizer = load_tokenizer(copy, called=folder)
        with blaming(job, "chat_template"):
            tokenizer.chat_template = _template_text(job, tokenizer, copy)
        return tokenizer, difference_to_file(tokenizer, copy / "tokenizer.json")


def read_template(job: TokenizerJob, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    """Return the template of a tokenizer from `read_tokenizer`, with the arguments and the date of `job.settings`."""
    date = job.settings.date
    return ChatTemplate(tokenizer, job.settings.template_kwargs, None if date is None else date.isoformat())


def _template_text(job: TokenizerJob, tokenizer: PreTrainedTokenizerFast, copy: Path) -> str | None:
    """Return the recipe's chat template, else the tokenizer's own: if it has several, the default one."""
    path = job.locations.chat_template
    if path is None:
        template = tokenizer.chat_template or _template_of_processor(copy / "chat_template.json")
        return template.get("default") if isinstance(template, dict) else template
    try:
        content = path.read_bytes()
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()  # all line ends become "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"`tokenization.chat_template` {path} cannot be read: {error}", "unreadable-chat-template"
        ) from error
    if hashlib.sha256(content).hexdigest() != job.settings.chat_template:
        raise DataError(f"{path} changed while it was read; run again once it is written", "file-changed")
    if not text:
        raise TemplateError(
            f"{path} is empty; expected a Jinja template, or null for the tokenizer's own", "empty-chat-template"
        )
    return text


def _template_of_processor(file: Path) -> str | None:
    """Return the template of a model that takes images. transformers reads this file only for the model's processor."""
    if not file.is_file():
        return None
    try:
        text: Any = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TemplateError(
            f'{file.name} cannot be read: {type(error).__name__}: {error}; expected {{"chat_template": ...}}, or set '
            "`tokenization.chat_template` to a .jinja file",
            "unreadable-chat-template",
        ) from error
    return text if isinstance(text, str) else None
