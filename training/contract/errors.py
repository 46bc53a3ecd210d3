"""The errors a person can meet, and the exit code each one becomes.

    PedigreeError                 something a person can act on; the command ends with exit code 1
    ├── UsageError                the request itself is wrong: unknown recipe, asset or row; exit code 2
    │   └── RecipeError           a field of a recipe (file, line, field, value, what was expected)
    ├── DataError                 input files that cannot be read or that change meanwhile; too much in quarantine
    ├── TemplateError             a chat template or tokenizer that cannot be used as the recipe asks
    ├── ModelError                weights that are missing, incomplete or of an unsupported kind
    ├── HubError                  a repository of the Hugging Face hub that cannot be fetched, or is not what the hub promised
    ├── StoreError                an artifact that cannot be written or published
    │   └── CorruptArtifact       an artifact whose bytes are not those its manifest promises
    │       └── CorruptRecord     its record of how it was made is damaged; a run can often write that again
    ├── UnreadableArtifact        an artifact that the operating system refuses to read now; it may be whole, so no StoreError
    ├── TrainingError             a run that must not go on: step-0 proof failed, non-finite loss or gradient
    ├── NodesError                nodes.yaml, or one of the machines it lists, that cannot be used
    ├── JobFailed                 a launched process ended badly; carries the root cause of the first failing rank
    └── RegistryError             the MLflow tracking server or registry cannot do what was asked
        ├── UnknownModel          it has no model of that name; exit code 2
        └── RegistryUnavailable  no answer, or only that the server failed: it may be back in a moment

Every message names the place, the value found, what was expected and what to do. Programmers' mistakes are `assert`s.
"""


class PedigreeError(Exception):
    exit_code = 1


class UsageError(PedigreeError):
    exit_code = 2


class RecipeError(UsageError):
    pass


class DataError(PedigreeError):
    pass


class TemplateError(PedigreeError):
    pass


class ModelError(PedigreeError):
    pass


class HubError(PedigreeError):
    pass


class StoreError(PedigreeError):
    pass


class CorruptArtifact(StoreError):
    pass


class CorruptRecord(CorruptArtifact):
    pass


class UnreadableArtifact(PedigreeError):
    pass


class TrainingError(PedigreeError):
    pass


class NodesError(PedigreeError):
    pass


class JobFailed(PedigreeError):
    pass


class RegistryError(PedigreeError):
    pass


class UnknownModel(RegistryError):
    exit_code = 2


class RegistryUnavailable(RegistryError):
    pass
