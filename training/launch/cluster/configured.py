"""The launcher of a home: jobs with a model run by the engine of `engine.yaml`, all others on this machine."""

from pathlib import Path
from typing import BinaryIO

from training.contract.protocol.job import Job
from training.launch.cluster.engine_file import ENGINE_FILE, LocalEngine, read_engine
from training.launch.cluster.slurm import SlurmLauncher
from training.launch.conductor import NodesLauncher
from training.launch.launcher import Handle, Launcher
from training.launch.local import LocalLauncher
from training.launch.nodes_file import NODES_FILE


class ConfiguredLauncher:
    """Reads `engine.yaml` for each job, so that a change of it needs no restart. Raises EngineError if it is invalid."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def find(self, job: Job) -> Handle | None:
        return self._engine_for(job).find(job)

    def start(self, job: Job, lock: BinaryIO | None = None) -> Handle:
        return self._engine_for(job).start(job, lock)

    def _engine_for(self, job: Job) -> Launcher:
        if not job.distributed:
            return LocalLauncher()
        path = self._home / ENGINE_FILE
        engine = read_engine(path)
        if isinstance(engine, LocalEngine):
            return NodesLauncher(self._home / NODES_FILE)
        return SlurmLauncher(engine, engine.profile(job.compute.queue, path))
