"""A job: one piece of work in processes of its own, described by one file, `job.json`.

The launching side writes it and `training.main` reads it. It names the artifact to make, the artifacts it is made from with
their folders, and the frozen settings. What comes out are `events.jsonl` and checkpoints in
the job's folder, and the artifact, published in the store.
"""

import contextlib
from pathlib import Path
from typing import Any, Literal

from training.contract.config.fields import StrictModel
from training.contract.config.recipe import Compute
from training.contract.identity.file_stamps import Stamps
from training.contract.identity.fingerprint import short
from training.contract.store.manifest import Derivation, Source
from training.contract.system.atomic_io import write_durably

# Environment variables by which a launcher reaches every process of a job.
# RENDEZVOUS: the file through which the ranks find each other; if unset, they use torchrun's store.
# SUPERVISOR: the id of the supervisor's process, with which the job's processes must end.
RENDEZVOUS, SUPERVISOR = "PEDIGREE_RENDEZVOUS", "PEDIGREE_SUPERVISOR"

CHECKPOINTS = "checkpoints"  # the folder in a job's own

JobKind = Literal[
    "preferences", "tokenizer", "pairs", "sft", "reference", "policy", "evaluation", "merge", "proof", "release_files"
]


def job_folder(home: Path, derivation: Derivation) -> Path:
    """Where the job that makes what `derivation` describes works."""
    return home / "jobs" / f"{derivation.kind}-{short(derivation.key)}"


def checkpoints_of(folder: Path, derivation: Derivation) -> Path:
    """Where, in the folder of a job's checkpoints, those are that it may go on from."""
    return folder / short(derivation.key)


def committed_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending, without those that were not written to the end."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


class Input(Source):
    """An input artifact, and the folder that holds it."""

    folder: Path


class Failure(StrictModel):
    """Why a job failed, as written by the first rank that failed; no traceback where the message suffices.

    Without a rank it comes from the launching side: a machine could not be used, or was lost.
    """

    type: str
    message: str
    rank: int | None
    traceback: str

    def write_first(self, path: Path) -> None:
        """Write it to `path`, unless a failure is there already, or the disk is full, which the launcher sees itself."""
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2))


class Job(StrictModel):
    """What to make (`artifact`), by which work (`kind`), from what (`inputs`, `settings`): together the derivation.

    Three fields change nothing that is made, so they are not in the derivation: `locations` says where files outside the
    store lie, `compute` says how to run, and `recipe` is the resolved recipe, written beside the result. `stamps` are, by
    input, those of its files when they were hashed: see training.contract.protocol.input_files.
    """

    kind: JobKind
    artifact: str
    code_version: str
    inputs: dict[str, Input]
    settings: dict[str, Any]
    locations: dict[str, Any]
    compute: Compute
    recipe: dict[str, Any]
    store: Path
    folder: Path
    stamps: dict[str, Stamps] | None = None

    @property
    def derivation(self) -> Derivation:
        inputs = {name: Source(kind=i.kind, fingerprint=i.fingerprint) for name, i in self.inputs.items()}
        return Derivation(kind=self.artifact, code_version=self.code_version, inputs=inputs, settings=self.settings)

    @property
    def staging(self) -> Path:
        """Where the artifact is written before it is published: one folder a key, since one writer has the key's lock."""
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
        """Where the ranks of one machine find each other."""
        return self.folder / "rendezvous"

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def distributed(self) -> bool:
        """Whether the processes that `compute` asks for share the work; work on data is one plain process."""
        return self.kind in ("sft", "reference", "policy", "evaluation", "proof")

    @property
    def nodes(self) -> int:
        return self.compute.nodes if self.distributed else 1

    @property
    def processes(self) -> int:
        """On each node."""
        return self.compute.processes_per_node if self.distributed else 1

    @property
    def grace_seconds(self) -> int:
        """The time between SIGTERM and SIGKILL when the job is stopped: training saves a checkpoint, other jobs nothing."""
        return self.compute.grace_seconds if self.kind in ("sft", "policy") else 1

    def write(self) -> Path:
        write_durably(self.path, self.model_dump_json(indent=2).encode())
        return self.path

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls.model_validate_json(path.read_text(encoding="utf-8"))
