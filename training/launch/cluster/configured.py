"""The engine of a home: jobs with a model run by the engine of `engine.yaml`, all others on this machine."""

import importlib
from pathlib import Path
from typing import BinaryIO

from training.contract.errors import EngineError
from training.contract.protocol.job import Job
from training.launch.cluster.engine_file import (
    ENGINE_FILE,
    LocalSettings,
    RayProfile,
    RaySettings,
    Settings,
    read_engine,
)
from training.launch.cluster.slurm import SlurmEngine
from training.launch.engine import Engine, Handle, Submission, record_of
from training.launch.local import LocalEngine

_FORMER_FILE = "nodes.yaml"


class ConfiguredEngine:
    """Reads `engine.yaml` for each job, so that a change of it needs no restart. Raises EngineError if it is invalid."""

    def __init__(self, home: Path, module: str = "training.main") -> None:
        self._home, self._module = home, module

    def find(self, job: Job) -> Handle | None:
        """Return the live job. Raises EngineError, too, if the job was submitted to another engine: it may still run there."""
        engine = self._engine_for(job)
        if (record := Submission.read(job)) is not None and record.engine != (named := self._settings().engine):
            raise EngineError(
                f"job {record.id} was submitted to {record.engine}, but engine.yaml now names {named}: name {record.engine} "
                f"there until the job has ended; if it has ended, remove {record_of(job)}",
                "other-engine",
            )
        return engine.find(job)

    def submit(self, job: Job, lock: BinaryIO | None = None) -> Handle:
        return self._engine_for(job).submit(job, lock)

    def _engine_for(self, job: Job) -> Engine:
        if not job.distributed:
            return LocalEngine(self._module)
        path, settings = self._home / ENGINE_FILE, self._settings()
        if isinstance(settings, RaySettings):
            return _ray_engine(settings, settings.profile(job.compute.queue, path), self._module)
        if not isinstance(settings, LocalSettings):
            return SlurmEngine(settings, settings.profile(job.compute.queue, path), self._module)
        if job.nodes > 1:
            raise EngineError(self._no_nodes(job.nodes), "no-engine")
        return LocalEngine(self._module)

    def _settings(self) -> Settings:
        return read_engine(self._home / ENGINE_FILE)

    def _no_nodes(self, count: int) -> str:
        former = self._home / _FORMER_FILE
        read = f"; {former} is not read any more" if former.exists() else ""
        return (
            f"`compute.nodes: {count}` needs Slurm or Ray, which {self._home / ENGINE_FILE} has to name{read}. On machines "
            "without a scheduler, type `ray start --head` on one and `ray start --address=...` on the others, then write\n"
            "    engine: ray\n    address: http://HEAD:8265"
        )


def _ray_engine(settings: RaySettings, profile: RayProfile, module: str) -> Engine:
    """Import Ray only if it is used: this takes a second."""
    try:
        imported = importlib.import_module("training.launch.cluster.ray_engine")
    except ModuleNotFoundError as error:
        raise EngineError(
            f"engine.yaml names Ray, but `{error.name}` is not installed: `pip install 'pedigree[ray]'`", "no-ray"
        ) from error
    engine: Engine = imported.RayEngine(settings, profile, module)
    return engine
