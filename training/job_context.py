"""The arguments of a job on one rank: the job, the ranks, and the writer of its events."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Input, Job, LocationsT, SettingsT
from training.distributed import Group


@dataclass(frozen=True)
class JobContext(Generic[SettingsT, LocationsT]):
    """A running job. Only rank 0 writes events."""

    job: Job[SettingsT, LocationsT]
    group: Group
    events: EventWriter

    @property
    def settings(self) -> SettingsT:
        return self.job.settings

    @property
    def inputs(self) -> dict[str, Input]:
        """The input artifacts by name (training.contract.protocol.artifacts)."""
        return self.job.inputs

    @property
    def staging(self) -> Path:
        """The folder for the files of the artifact."""
        return self.job.staging
