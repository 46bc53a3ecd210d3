"""A job: one piece of work in its own processes, described by one file, `job.json`.

The launcher writes it and `training.main` reads it. It names the artifact to make, its inputs with their folders, and the
frozen settings. A job writes `events.jsonl` and checkpoints into its folder, and publishes the artifact in the store.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal

from pydantic import SerializeAsAny, field_serializer, model_validator
from typing_extensions import TypeVar  # with a default, as in Python 3.13

from training.contract.config.fields import StrictModel
from training.contract.config.json_object import JsonObject
from training.contract.config.key_settings import Settings, key_settings
from training.contract.config.recipe import Compute, Recipe
from training.contract.identity.file_stamps import Stamps
from training.contract.identity.fingerprint import short
from training.contract.protocol.locations import (
    Locations,
    PairsLocations,
    PolicyLocations,
    PreferencesLocations,
    ReleaseFilesLocations,
    TokenizerLocations,
)
from training.contract.protocol.prequential import PrequentialSettings
from training.contract.protocol.settings import (
    EvaluationSpec,
    NoSettings,
    PairsSettings,
    PreferencesSettings,
    ReleaseFilesSettings,
    RescoreSettings,
    ScoringSettings,
    SupervisedTuningSettings,
    TokenizationSettings,
    TrainingSpec,
)
from training.contract.store.manifest import Derivation, Source
from training.contract.system.atomic_io import write_durably

# Environment variables from the launcher to every process of a job.
# RENDEZVOUS: the file through which the ranks find each other; if unset, they use torchrun's store.
# SUPERVISOR: the supervisor's process id; the job's processes end with the supervisor.
RENDEZVOUS, SUPERVISOR = "PEDIGREE_RENDEZVOUS", "PEDIGREE_SUPERVISOR"

CHECKPOINTS = "checkpoints"  # a folder in the job's folder

JobKind = Literal[
    "preferences",
    "tokenizer",
    "pairs",
    "sft",
    "reference",
    "prequential",
    "policy",
    "evaluation",
    "merge",
    "proof",
    "release_files",
]

SettingsT = TypeVar("SettingsT", bound=Settings, default=Settings, covariant=True)
LocationsT = TypeVar("LocationsT", bound=Locations, default=Locations, covariant=True)


def job_folder(home: Path, derivation: Derivation) -> Path:
    """Return the folder of the job for `derivation`."""
    return home / "jobs" / f"{derivation.kind}-{short(derivation.key)}"


def checkpoints_of(folder: Path, derivation: Derivation) -> Path:
    """Return the subfolder with checkpoints of this `derivation`, from which its job can resume."""
    return folder / short(derivation.key)


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


class Input(Source):
    """An input artifact and its folder."""

    folder: Path


class Failure(StrictModel):
    """The error of the first failing rank; the traceback is empty if the message is enough.

    A failure without a rank comes from the launcher: a machine was unusable or lost.
    """

    type: str
    message: str
    rank: int | None
    traceback: str

    def write_first(self, path: Path) -> None:
        """Write it to `path`, unless `path` exists. Ignore a full disk: the launcher notices it by itself."""
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2))


class Job(StrictModel, Generic[SettingsT, LocationsT]):
    """One job. `artifact`, `code_version`, `inputs` and `settings` form the derivation; `kind` selects the code.

    The other fields do not change the result:

        locations   paths of files outside the store
        compute     how to run
        recipe      the resolved recipe, written beside the result
        stamps      by input, the stamps of its files at the time of hashing (training.contract.protocol.input_files)
    """

    kind: JobKind
    artifact: str
    code_version: str
    inputs: dict[str, Input]
    settings: SettingsT
    locations: SerializeAsAny[LocationsT]
    compute: Compute
    recipe: Recipe
    store: Path
    folder: Path
    stamps: dict[str, Stamps] | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse_by_kind(cls, fields: Any) -> Any:
        """Parse JSON settings and locations with the models of the job's kind."""
        if not isinstance(fields, dict) or (models := JOB_MODELS.get(fields.get("kind", ""))) is None:
            return fields
        return {
            **fields,
            "settings": models.settings.model_validate(fields.get("settings")),
            "locations": models.locations.model_validate(fields.get("locations", {})),
        }

    @field_serializer("settings")
    def _write_settings(self, settings: Settings) -> JsonObject:
        return key_settings(settings)

    @property
    def derivation(self) -> Derivation:
        inputs = {
            name: Source(kind=source.kind, fingerprint=source.fingerprint) for name, source in self.inputs.items()
        }
        settings = key_settings(self.settings)
        return Derivation(kind=self.artifact, code_version=self.code_version, inputs=inputs, settings=settings)

    @property
    def staging(self) -> Path:
        """The folder of the unpublished artifact: one per key, since one writer holds the key's lock."""
        return self.store / "staging" / f"{self.artifact}-{self.derivation.key}"

    @property
    def path(self) -> Path:
        return self.folder / "job.json"

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "job.log"

    @property
    def error(self) -> Path:
        return self.folder / "error.json"

    @property
    def rendezvous(self) -> Path:
        """The file through which the ranks of one machine find each other."""
        return self.folder / "rendezvous"

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def distributed(self) -> bool:
        """Whether the job runs on all processes of `compute`; work on data runs in one process."""
        return self.kind in ("sft", "reference", "prequential", "policy", "evaluation", "proof")

    @property
    def nodes(self) -> int:
        return self.compute.nodes if self.distributed else 1

    @property
    def processes(self) -> int:
        """The number of processes on each node."""
        return self.compute.processes_per_node if self.distributed else 1

    @property
    def grace_seconds(self) -> int:
        """The time between SIGTERM and SIGKILL: long enough to save a checkpoint in training, short in other jobs."""
        return self.compute.grace_seconds if self.kind in ("sft", "policy") else 1

    def write(self) -> Path:
        write_durably(self.path, self.model_dump_json(indent=2).encode())
        return self.path

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class JobModels:
    """The models of a kind's settings and locations."""

    settings: type[Settings]
    locations: type[Locations] = Locations


JOB_MODELS: dict[JobKind, JobModels] = {
    "preferences": JobModels(PreferencesSettings, PreferencesLocations),
    "tokenizer": JobModels(TokenizationSettings, TokenizerLocations),
    "release_files": JobModels(ReleaseFilesSettings, ReleaseFilesLocations),
    "pairs": JobModels(PairsSettings, PairsLocations),
    "sft": JobModels(SupervisedTuningSettings),
    "reference": JobModels(ScoringSettings),
    "prequential": JobModels(PrequentialSettings),
    "policy": JobModels(TrainingSpec, PolicyLocations),
    "evaluation": JobModels(EvaluationSpec),
    "merge": JobModels(NoSettings),
    "proof": JobModels(RescoreSettings),
}
