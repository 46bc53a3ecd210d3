"""Read the tokenizer and the chat template of a recipe, from copies of exactly the files in the key."""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerFast

from training.contract.config.key_settings import Settings
from training.contract.errors import DataError, TemplateError
from training.contract.identity.chat_template import chat_template
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
            tokenizer.chat_template = _template_text(job, copy)
        return tokenizer, difference_to_file(tokenizer, copy / "tokenizer.json")


def read_template(job: TokenizerJob, tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    """Return the template of a tokenizer from `read_tokenizer`, with the arguments and the date of `job.settings`."""
    date = job.settings.date
    return ChatTemplate(tokenizer, job.settings.template_kwargs, None if date is None else date.isoformat())


def _template_text(job: TokenizerJob, copy: Path) -> str | None:
    """Return the text of the template that counts, of the tokenizer in `copy`."""
    path = job.locations.chat_template
    if path is None:
        return chat_template(copy, None)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TemplateError(f"it cannot be read: {error}", "unreadable-chat-template") from error
    if hashlib.sha256(content).hexdigest() != job.settings.chat_template:
        raise DataError(f"{path} changed while it was read; run again once it is written", "file-changed")
    if not content:
        raise TemplateError(
            f"{path} is empty; expected a Jinja template, or null for the tokenizer's own", "empty-chat-template"
        )
    return chat_template(copy, content)
