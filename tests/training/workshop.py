"""Real jobs, done in this process, each published in one store."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.training.runs import ALONE
from training.contract.events import EventWriter
from training.contract.job import Input, Job, JobKind
from training.contract.recipe import Compute
from training.contract.store import Artifact, Made, Store
from training.distributed import Group

Work = Callable[[Job, Group, EventWriter], Made]


@dataclass(frozen=True)
class Workshop:
    """Does real jobs, one after the other and in this process, and publishes what they make in a store of its own."""

    root: Path

    def job(
        self,
        kind: JobKind,
        artifact: str,
        inputs: dict[str, Artifact | Path],
        settings: dict[str, Any],
        locations: dict[str, Any] | None = None,
    ) -> Job:
        """A job on artifacts, or on folders that stand for one (whose fingerprint is then their name's, repeated)."""
        job = Job(
            kind=kind,
            artifact=artifact,
            code_version="1",
            inputs={name: _as_input(name, given) for name, given in inputs.items()},
            settings=settings,
            locations=locations or {},
            compute=Compute(device="cpu"),
            recipe={},
            store=self.root / "store",
            folder=self.root / "jobs" / artifact,
        )
        job.write()
        return job

    def do(self, work: Work, job: Job) -> Artifact:
        job.staging.mkdir(parents=True, exist_ok=True)
        made = work(job, ALONE, EventWriter(job.events))
        return Store(job.store).publish(job.staging, job.derivation, made)


def _as_input(name: str, given: Artifact | Path) -> Input:
    if isinstance(given, Path):
        return Input(kind=name, fingerprint=given.name.encode().hex()[:64].ljust(64, "0"), folder=given)
    return Input(kind=given.manifest.kind, fingerprint=given.fingerprint, folder=given.folder)
