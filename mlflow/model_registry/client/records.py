"""MLflow's records of runs and model versions, only to be read: through MLflow's client, or without it (sqlite_records.py).

Everyday commands only read. They ask whether a run is complete, or which version is the champion.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from model_registry.client import mlflow_api
from model_registry.model_version import Version

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


@dataclass(frozen=True)
class RecordedRun:
    """A run in MLflow. Its `status` is one of MLflow's, such as FINISHED."""

    run_id: str
    experiment_id: str
    status: str
    tags: Mapping[str, str]

    @classmethod
    def of(cls, run: "Run") -> Self:
        return cls(str(run.info.run_id), str(run.info.experiment_id), run.info.status, dict(run.data.tags))


class Records(Protocol):
    """The records. A missing run or version raises an error."""

    def run(self, run_id: str) -> RecordedRun: ...

    def runs(self, experiment: str, tag: str, value: str) -> list[RecordedRun]:
        """Return the runs with this value of a tag, oldest first, without deleted ones."""

    def version(self, name: str, number: str) -> Version: ...

    def versions(self, name: str | None) -> list[Version]:
        """Return all versions of a registered model, or of every model if `name` is None; the latest first."""

    def aliases(self, name: str) -> dict[str, str] | None:
        """Return the aliases of a registered model with their versions, or None for an unknown model."""

    def model_tags(self, name: str) -> dict[str, str]:
        """Return the tags of a registered model; nothing for an unknown model."""


class ClientRecords:
    """The records as MLflow's client finds them."""

    def __init__(self, client: "MlflowClient") -> None:
        self._client = client

    def run(self, run_id: str) -> RecordedRun:
        return RecordedRun.of(self._client.get_run(run_id))

    def runs(self, experiment: str, tag: str, value: str) -> list[RecordedRun]:
        found = self._client.get_experiment_by_name(experiment)
        runs = [] if found is None else find_runs(self._client, found.experiment_id, tag, value)
        return [RecordedRun.of(run) for run in runs]

    def version(self, name: str, number: str) -> Version:
        return Version.of(self._client.get_model_version(name, number))

    def versions(self, name: str | None) -> list[Version]:
        query = None if name is None else f"name = '{name}'"
        versions: list[Version] = []
        token = None
        while True:
            batch = self._client.search_model_versions(query, page_token=token)
            versions += [Version.of(version) for version in batch]
            if not (token := batch.token):
                return sorted(versions, key=lambda version: version.number, reverse=True)

    def aliases(self, name: str) -> dict[str, str] | None:
        return find_aliases(self._client, name)

    def model_tags(self, name: str) -> dict[str, str]:
        try:
            return dict(self._client.get_registered_model(name).tags)
        except mlflow_api.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise


def find_runs(client: "MlflowClient", experiment_id: str, tag: str, value: str) -> "list[Run]":
    """Return the runs of an experiment with this value of a tag, oldest first, without deleted ones."""
    query = f"tags.`{tag}` = '{value}'"
    return list(client.search_runs([experiment_id], query, order_by=["attributes.start_time ASC"]))


def find_aliases(client: "MlflowClient", name: str) -> dict[str, str] | None:
    """Return the aliases of a registered model with their versions, or None for an unknown model."""
    try:
        return {alias: str(number) for alias, number in client.get_registered_model(name).aliases.items()}
    except mlflow_api.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
