"""The `release_files` job: all that is released beside the weights, as this recipe's own files say it.

    tokenizer/    as transformers saves the recipe's tokenizer, with the recipe's chat template
    model/        generation_config.json, with the tokens at which the model stops; the processors of images and sound
    spec.json     the fingerprints of tokenizer and template, and the settings

Other artifacts are shared by all recipes whose content is the same for training. The padding token, the longest input that a
tokenizer accepts, and settings of generation change no token and no weight: so they are released from here and nowhere else.

The saved tokenizer must give the ids of training also beside the model's config.json, by which transformers may pick
another class. It is loaded so, and refused if it gives others.
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
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import JobResult, write_json
from training.data.templates.chat_template import ChatTemplate
from training.data.templates.template_warnings import end_of_turn, stop_notes
from training.data.templates.tokenizer import load_tokenizer, save_tokenizer, tokenizer_fingerprint
from training.data.templates.tokenizer_source import blaming, read_template, read_tokenizer
from training.distributed import Group

TOKENIZER_FOLDER, MODEL_FOLDER, SPEC_FILE = "tokenizer", "model", "spec.json"
_ANY_TOKENIZER = "TokenizersBackend"  # the class of transformers that takes tokenizer.json as it is
_CLASS = "tokenizer_class"


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Write the files that are released. Raises TemplateError if they cannot be used, DataError if they changed."""
    assert group.world == 1, "collecting files is the work of one process"
    events.phase("collecting the files that are released")
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
    shipped = {name: _content(job.staging / name) for name in sorted(_files(job.staging))}
    return JobResult(fingerprint("release_spec", shipped), spec | {"notes": notes, "files": sorted(shipped)})


def _eos_token_ids(job: Job, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids at which the released model stops: those of the base model's files, and of `release.eos_tokens`."""
    known, added = tokenizer.get_vocab(), job.settings.get("eos_tokens", [])
    if unknown := [token for token in added if token not in known]:
        raise TemplateError(
            f"`release.eos_tokens` has {', '.join(map(repr, unknown))}, which the tokenizer does not have as one token; name "
            "tokens as they are spelled in tokenizer.json"
        )
    return sorted({*job.settings["eos_token_ids"], *(known[token] for token in added)})


def _notes(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, eos: list[int]) -> Iterator[str]:
    ends = end_of_turn(tokenizer, template)
    names = ", ".join(str(token or id_) for id_, token in zip(eos, tokenizer.convert_ids_to_tokens(eos), strict=True))
    return stop_notes(ends, [tokenizer.convert_tokens_to_ids(token) for token in ends], eos, names)


def _check_same_beside_config(job: Job, expected: str) -> None:
    """Raise TemplateError unless the saved tokenizer, beside the model's config.json, is still the one that was loaded.

    If its class is what makes the difference, it is saved as one that takes tokenizer.json as it is.
    """
    path = job.staging / TOKENIZER_FOLDER / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    for config in (saved, saved | {_CLASS: _ANY_TOKENIZER}):
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
        if (found := _fingerprint_beside_config(job)) == expected:
            return
    raise TemplateError(
        f"the tokenizer gives other tokens beside the config.json of the base model {job.locations['base']} (it is "
        f"{short(found)} there, and {short(expected)} as it was loaded): transformers picks another class for its model_type "
        f"{job.settings['base_config'].get('model_type')!r}. A server would not use the tokens of training; use the tokenizer "
        "of the base model, or a base model whose config.json has the `tokenizer_class` of this tokenizer"
    )


def _fingerprint_beside_config(job: Job) -> str:
    with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
        folder = Path(scratch)
        for file in (job.staging / TOKENIZER_FOLDER).iterdir():
            copy_file(file, folder / file.name, hash_file(file))
        write_class_fields(folder, job.settings["base_config"])
        return tokenizer_fingerprint(load_tokenizer(folder))


def _write_model_files(job: Job, eos: list[int]) -> None:
    base, folder = Path(job.locations["base"]), job.staging / MODEL_FOLDER
    folder.mkdir()
    for name, sha256 in job.settings["processors"].items():
        copy_file(base / name, folder / name, sha256)
    answering = job.settings.get("generation", {})
    write_json(folder / GENERATION_CONFIG, released_settings(job.settings["base_generation"], eos, answering))


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _content(file: Path) -> Any:
    """What of a file counts: of JSON what it says, else its bytes."""
    if file.suffix != ".json":
        return hash_file(file)
    return fingerprint("json", json.loads(file.read_text(encoding="utf-8")))
