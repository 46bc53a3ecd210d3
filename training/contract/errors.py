"""Errors that a user can act on, their exit codes, and their stable codes.

    PedigreeError                 the command ends with exit code 1
    ├── UsageError                the request is wrong: unknown recipe, asset or row; exit code 2
    │   └── RecipeError           a field of a recipe (file, line, field, value, what was expected)
    ├── DataError                 input files that cannot be read or that change meanwhile; too much in quarantine
    ├── TemplateError             a chat template or tokenizer that cannot be used as the recipe asks
    ├── ModelError                weights that are missing, incomplete or of an unsupported kind
    ├── HubError                  a repository of the Hugging Face Hub that cannot be fetched, or has other files than promised
    ├── StoreError                an artifact that cannot be written or published
    │   └── CorruptArtifact       an artifact whose bytes differ from its manifest
    │       └── CorruptRecord     the record of a derivation is damaged; a run can often write it again
    ├── UnreadableArtifact        the operating system cannot read an artifact now; it may be intact, so this is no StoreError
    ├── TrainingError             a run that must not go on: failed reference check, non-finite loss or gradient
    ├── EngineError               engine.yaml, or the engine that it names, cannot be used
    ├── JobFailed                 a launched process ended badly; has the root cause of the first failing rank
    └── RegistryError             the MLflow tracking server or registry cannot do what was asked
        ├── UnknownModel          it has no model of that name; exit code 2
        └── RegistryUnavailable   no answer, or a failure of the server: it may be back in a moment

Every message names the place, the value found, the expected value and the next action. The code ends it, in brackets, as in
mypy: `... expected a number [wrong-type]`. So the code survives in logs, in Dagster and in `--json`.
docs/reference/errors.md lists the codes. Programmers' mistakes are `assert`s.
"""

import re

_CODE_AT_END = re.compile(r"[ \n]\[([a-z0-9]+(?:-[a-z0-9]+)*)\]$")


def code_of(message: str) -> str | None:
    """Return the code at the end of an error's message; None if there is none."""
    found = _CODE_AT_END.search(message)
    return found[1] if found else None


def without_code(message: str) -> str:
    """Return the message without the code at its end."""
    return _CODE_AT_END.sub("", message)


class PedigreeError(Exception):
    """An error with a stable `code`, by default the code of its class.

    If the message repeats another error and ends with its code, the error keeps that code.
    """

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, code: str | None = None) -> None:
        known = code_of(message)
        self.code = code or known or type(self).code
        separator = "\n" if "\n" in message else " "  # the last lines may be an example to copy
        super().__init__(message if known == self.code else f"{message}{separator}[{self.code}]")


class UsageError(PedigreeError):
    exit_code = 2
    code = "usage"


class RecipeError(UsageError):
    code = "recipe"


class DataError(PedigreeError):
    code = "data"


class TemplateError(PedigreeError):
    code = "template"


class ModelError(PedigreeError):
    code = "model"


class HubError(PedigreeError):
    code = "hub"


class StoreError(PedigreeError):
    code = "store"


class CorruptArtifact(StoreError):
    code = "corrupt-artifact"


class CorruptRecord(CorruptArtifact):
    code = "corrupt-record"


class UnreadableArtifact(PedigreeError):
    code = "unreadable-artifact"


class TrainingError(PedigreeError):
    code = "training"


class EngineError(PedigreeError):
    code = "engine"


class JobFailed(PedigreeError):
    code = "job-failed"


class RegistryError(PedigreeError):
    code = "registry"


class UnknownModel(RegistryError):
    exit_code = 2
    code = "unknown-model"


class RegistryUnavailable(RegistryError):
    code = "registry-unavailable"
