"""Real jobs, done in this process, each published in one store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.training.runs import ALONE
from training import main
from training.contract.job import Input, Job, JobKind
from training.contract.recipe import Compute
from training.contract.store import Artifact, Store

ON_CPU = Compute(device="cpu")


@dataclass(frozen=True)
class Workshop:
    """Does real jobs, one after the other and in this process, and publishes what they make in a store of its own."""

    folder: Path
    compute: Compute = ON_CPU

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
            compute=self.compute,
            recipe={},
            store=self.folder / "store",
            folder=self.folder / "jobs" / artifact,
        )
        job.write()
        return job

    @staticmethod
    def do(job: Job) -> Artifact:
        main.make(job, ALONE)
        made = Store(job.store).find(job.artifact, job.derivation.key)
        assert made is not None
        return made


def _as_input(name: str, given: Artifact | Path) -> Input:
    if isinstance(given, Path):
        return Input(kind=name, fingerprint=given.name.encode().hex()[:64].ljust(64, "0"), folder=given)
    return Input(kind=given.manifest.kind, fingerprint=given.fingerprint, folder=given.folder)
