"""The `release_files` job: the files that are released beside the weights.

    tokenizer/    the recipe's tokenizer with its chat template, as transformers saves it
    model/        generation_config.json with the stop tokens; the processors of images and sound
    spec.json     the fingerprints of tokenizer and template, and the settings

Recipes share other artifacts if their content is the same for training. The padding token, a tokenizer's longest input and
generation settings change no token and no weight. So they come from this artifact only.

transformers may pick another tokenizer class from the model's config.json. So the job loads the saved tokenizer beside that
file and compares its fingerprint.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from training.contract.errors import TemplateError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.identity.stop_tokens import GENERATION_CONFIG, released_settings
from training.contract.identity.tokenizer_files import copy_file, write_class_fields
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import ReleaseFilesDetails
from training.contract.protocol.job import Job
from training.contract.protocol.locations import ReleaseFilesLocations
from training.contract.protocol.settings import ReleaseFilesSettings
from training.contract.protocol.spec_files import SPEC_FILE, TOKENIZER_FOLDER
from training.contract.store.artifact import JobResult, write_json
from training.data.templates.chat_template import ChatTemplate
from training.data.templates.template_warnings import end_of_turn, stop_notes
from training.data.templates.tokenizer import load_tokenizer, save_tokenizer, tokenizer_fingerprint
from training.data.templates.tokenizer_source import blaming, read_template, read_tokenizer
from training.job_context import JobContext

ReleaseJob = Job[ReleaseFilesSettings, ReleaseFilesLocations]

MODEL_FOLDER = "model"
_ANY_TOKENIZER = "TokenizersBackend"  # the transformers class that uses tokenizer.json unchanged
_CLASS = "tokenizer_class"


def run(context: JobContext[ReleaseFilesSettings, ReleaseFilesLocations]) -> JobResult[ReleaseFilesDetails]:
    """Write the released files. Raises TemplateError if they cannot be used, DataError if they changed."""
    job, events = context.job, context.events
    assert context.group.world == 1, "the release_files job runs in one process"
    events.phase("collecting the released files")
    tokenizer, _ = read_tokenizer(job)
    with blaming(job, "chat_template"):
        template = read_template(job, tokenizer)
    save_tokenizer(tokenizer, job.staging / TOKENIZER_FOLDER)
    with blaming(job, "tokenizer"):
        _check_same_beside_config(job, tokenizer_fingerprint(tokenizer))
    eos = _eos_token_ids(job, tokenizer)
    notes = list(_notes(tokenizer, template, eos))
    for note in notes:
        events.note(note)
    _write_model_files(job, eos)
    spec = {
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "template_fingerprint": template.fingerprint(),
        "eos_token_ids": eos,
    }
    write_json(job.staging / SPEC_FILE, spec)
    released = {name: _content_digest(job.staging / name) for name in sorted(_list_files(job.staging))}
    details = ReleaseFilesDetails(notes=tuple(notes), files=tuple(sorted(released)), eos_token_ids=tuple(eos))
    return JobResult(fingerprint(AssetName.RELEASE_SPEC.value, released), details)


def _eos_token_ids(job: ReleaseJob, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the stop ids of the released model: the ids in the base model's files, and `release.eos_tokens`."""
    vocabulary, added = tokenizer.get_vocab(), job.settings.eos_tokens
    if unknown := [token for token in added if token not in vocabulary]:
        raise TemplateError(
            f"`release.eos_tokens` has {', '.join(map(repr, unknown))}; expected single tokens of the tokenizer, "
            "spelled as in tokenizer.json",
            "unknown-eos-token",
        )
    return sorted({*job.settings.eos_token_ids, *(vocabulary[token] for token in added)})


def _notes(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, eos: list[int]) -> Iterator[str]:
    ends = end_of_turn(tokenizer, template)
    names = ", ".join(str(token or id_) for id_, token in zip(eos, tokenizer.convert_ids_to_tokens(eos), strict=True))
    return stop_notes(ends, [tokenizer.convert_tokens_to_ids(token) for token in ends], eos, names)


def _check_same_beside_config(job: ReleaseJob, expected: str) -> None:
    """Raise TemplateError if the saved tokenizer differs from the loaded one when it is beside the model's config.json.

    If only the class differs, save the tokenizer with a class that uses tokenizer.json unchanged.
    """
    path = job.staging / TOKENIZER_FOLDER / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    for config in (saved, saved | {_CLASS: _ANY_TOKENIZER}):
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
        if (found := _fingerprint_beside_config(job)) == expected:
            return
    raise TemplateError(
        f"the tokenizer gives other tokens beside the config.json of the base model {job.locations.base}: fingerprint "
        f"{short(found)}, expected {short(expected)}. transformers picks another class for model_type "
        f"{job.settings.base_config.get('model_type')!r}, so a server would not use the tokens of training. Use the "
        "tokenizer of the base model, or a base model whose config.json has this tokenizer's `tokenizer_class`",
        "tokenizer-class-mismatch",
    )


def _fingerprint_beside_config(job: ReleaseJob) -> str:
    with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
        folder = Path(scratch)
        for file in (job.staging / TOKENIZER_FOLDER).iterdir():
            copy_file(file, folder / file.name, hash_file(file))
        write_class_fields(folder, job.settings.base_config)
        return tokenizer_fingerprint(load_tokenizer(folder))


def _write_model_files(job: ReleaseJob, eos: list[int]) -> None:
    base, folder = job.locations.base, job.staging / MODEL_FOLDER
    folder.mkdir()
    for name, sha256 in job.settings.processors.items():
        copy_file(base / name, folder / name, sha256)
    settings = released_settings(job.settings.base_generation, eos, job.settings.generation)
    write_json(folder / GENERATION_CONFIG, settings)


def _list_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _content_digest(file: Path) -> Any:
    """Return a digest of the parsed content of a JSON file, or of the bytes of another file."""
    if file.suffix != ".json":
        return hash_file(file)
    return fingerprint("json", json.loads(file.read_text(encoding="utf-8")))
