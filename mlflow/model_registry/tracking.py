"""Tracking: one MLflow run for every policy, fed with the events of the job that trains it.

Training writes events to a file and knows nothing of MLflow; whoever follows that file passes each event to
`TrackedRun.record`. So an outage of the tracking server, at any moment, costs a warning: events are kept and delivered
when it answers again, and `replay` logs a whole events file later. A run is found again by the tag `pedigree.key`,
which holds the key of the policy's derivation, and continued: a resumed training adds the steps that are missing.

By default everything lies in SQLite and a folder under the home of Pedigree; MLFLOW_TRACKING_URI names another place, for
the registry alone MLFLOW_REGISTRY_URI.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException
from sqlalchemy import make_url

from model_registry.connection import (
    PAGES_VARIABLE,
    REGISTRY_VARIABLE,
    TRACKING_VARIABLE,
    Connection,
    is_server,
    page,
    shown,
    without_retries,
)
from model_registry.mlflow_types import DatasetRef, flatten, is_finite, tags_of
from model_registry.tracked_run import RunPlan, TrackedRun
from training.contract.errors import RegistryError, UsageError

KEY_TAG = "pedigree.key"
CHARTS = "model-metrics"  # as MLflow's addresses call the charts of a run
_EVALUATION_TAG = "pedigree.evaluation"
# What MLflow takes, with a registry; a folder of files only where a person has set MLFLOW_ALLOW_FILE_STORE.
_KINDS = {"http", "https", "sqlite", "postgresql", "mysql", "mssql"}
_LOG = logging.getLogger(__name__)


def tracking_uri(home: Path, environ: Mapping[str, str]) -> str:
    """MLFLOW_TRACKING_URI where it is set, else a SQLite file under `home`.

    Raises UsageError for an address that can never answer. One that is only away is noticed when it is asked.
    """
    check_database_folder(home, "PEDIGREE_HOME")
    return _address(TRACKING_VARIABLE, environ) or f"sqlite:///{home.absolute()}/mlflow/mlflow.db"


def check_database_folder(folder: Path, variable: str) -> None:
    """Raises UsageError if the address of a SQLite file in `folder`, which `variable` names, would lead elsewhere."""
    place = str(folder.absolute())
    if make_url(f"sqlite:///{place}").database != place:
        raise UsageError(
            f"{variable} is {folder}; a `?`, or a `%` before two hexadecimal digits, means something else in the address of "
            "a database: name another folder"
        )


def registry_uri(home: Path, environ: Mapping[str, str]) -> str:
    """MLFLOW_REGISTRY_URI where it is set, else what holds the runs holds the registry too. Raises as `tracking_uri`."""
    return _address(REGISTRY_VARIABLE, environ) or tracking_uri(home, environ)


def _address(variable: str, environ: Mapping[str, str]) -> str:
    uri = environ.get(variable, "")
    if uri and uri.partition("://")[0].partition("+")[0] not in _KINDS and not environ.get("MLFLOW_ALLOW_FILE_STORE"):
        raise UsageError(
            f"{variable} is {shown(uri)!r}; expected a server's or a database's address, such as http://host:5000 or "
            "sqlite:////folder/mlflow.db"
        )
    return uri


def artifact_root(home: Path) -> Path:
    """Where artifacts lie unless a tracking server decides."""
    return home.absolute() / "mlflow" / "artifacts"


class Tracker:
    """Runs and their metrics on one tracking server or database; contacted on first use, never on construction.

    `artifact_root` is where artifacts of new experiments lie; a server uses its own. No method raises because of the
    server: `warn` is told.
    """

    def __init__(
        self, tracking_uri: str, artifact_root: Path | None, warn: Callable[[str], None] = _LOG.warning
    ) -> None:
        self.tracking_uri = tracking_uri
        self._connection = Connection(tracking_uri, warn)
        self._artifact_root = None if is_server(tracking_uri) else artifact_root

    @property
    def failure(self) -> RegistryError | None:
        """Why the last call failed that did."""
        return self._connection.failure

    @contextmanager
    def run(
        self,
        *,
        experiment: str,
        key: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        dataset: DatasetRef | None = None,
    ) -> Iterator[TrackedRun]:
        """The run of the policy `key`, new or continued; finished, failed or killed as the body ends."""
        plan = RunPlan(name, flatten(params), {**tags_of(tags), KEY_TAG: key}, dataset)
        run = TrackedRun(self._connection, lambda: self._open(experiment, key, plan), plan)
        run.flush()
        try:
            yield run
        except Exception:
            run.finish("FAILED")
            raise
        except BaseException:  # Ctrl-C, and a cancelled Dagster run
            run.finish("KILLED")
            raise
        run.finish("FINISHED")

    def find_run(self, experiment: str, key: str) -> str | None:
        """The id of the policy's complete run: a finished one, which has every event it was given.

        None where there is none, or where the server cannot be asked: replay the events then.
        """

        def work(client: MlflowClient) -> str | None:
            place = client.get_experiment_by_name(experiment)
            runs = [] if place is None else _runs(client, place.experiment_id, key)
            return next((str(run.info.run_id) for run in runs if run.info.status == "FINISHED"), None)

        return self._connection.try_request("look for a run", work)

    def experiment_id(self, name: str) -> str | None:
        """Return the id of an experiment. None if there is none of that name, or if the server does not answer."""

        def work(client: MlflowClient) -> str | None:
            found = client.get_experiment_by_name(name)
            return None if found is None or found.lifecycle_stage == "deleted" else str(found.experiment_id)

        return self._connection.try_request("look for an experiment", work)

    def tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Add tags to a run, finished or not; what an outage keeps away the next call brings."""

        def work(client: MlflowClient) -> None:
            for name, value in tags_of(tags).items():
                client.set_tag(run_id, name, value)

        self._connection.try_request("tag a run", work)

    @property
    def is_served(self) -> bool:
        """Whether links lead to a server that others run. If not, `pedigree ui` serves the pages."""
        return is_server(self.tracking_uri) or bool(os.environ.get(PAGES_VARIABLE))

    def run_link(self, run_id: str, part: str = CHARTS) -> str:
        """Return the address of a `part` of the run's page, by default its charts.

        If the server does not answer, return the address of its first page.
        """

        def work(client: MlflowClient) -> str:
            experiment_id = client.get_run(run_id).info.experiment_id
            return page(self.tracking_uri, f"experiments/{experiment_id}/runs/{run_id}/{part}")

        return self._connection.try_request("find the page of a run", work) or page(self.tracking_uri)

    def log_evaluation(self, run_id: str, identity: str, metrics: Mapping[str, float], step: int, report: Path) -> bool:
        """Add an evaluation to a run, finished or not: `metrics` at `step`, and `report`; gives whether the server has both.

        A tag that is set last names the evaluation, by its `identity`, that is there. So what an outage kept away arrives at
        the next call, one that comes again costs a request, and one that broke off leaves no value to be added twice.
        """
        moment = round(time.time() * 1000)
        points = [Metric(name, value, moment, step) for name, value in metrics.items()]

        def work(client: MlflowClient) -> bool:
            if client.get_run(run_id).data.tags.get(_EVALUATION_TAG) == identity:
                return True
            new = [point for point in self._finite(points) if not _is_latest(client, run_id, point)]
            client.log_batch(run_id, metrics=new)
            client.log_artifact(run_id, str(report), "evaluation")
            client.set_tag(run_id, _EVALUATION_TAG, identity)
            return True

        return bool(self._connection.try_request("log the evaluation; a later run does", work))

    def _finite(self, points: list[Metric]) -> list[Metric]:
        if left_out := sorted(point.key for point in points if not is_finite(point)):
            self._connection.warn(f"not logged to MLflow, since not finite: {', '.join(left_out)}")
        return [point for point in points if is_finite(point)]

    def _open(self, experiment: str, key: str, plan: RunPlan) -> Run:
        client = self._connection.client
        experiment_id = self._experiment(client, experiment)
        if runs := _runs(client, experiment_id, key):
            return runs[0]
        with without_retries():  # if the answer is lost, the next delivery finds the run
            return client.create_run(experiment_id, tags={KEY_TAG: key}, run_name=plan.name)

    def _experiment(self, client: MlflowClient, name: str) -> str:
        """The experiment's id, new or not. One that was deleted by hand comes back, with what it held."""
        found = client.get_experiment_by_name(name)
        if found is None:
            location = (self._artifact_root / name).as_uri() if self._artifact_root else None
            try:
                return str(client.create_experiment(name, artifact_location=location))
            except MlflowException:
                found = client.get_experiment_by_name(name)
                if found is None:  # else another process has made it meanwhile
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)


def _runs(client: MlflowClient, experiment_id: str, key: str) -> list[Run]:
    """The runs of a policy, oldest first; more than one only if two processes began at the same moment."""
    return list(
        client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", order_by=["attributes.start_time ASC"])
    )


def _is_latest(client: MlflowClient, run_id: str, point: Metric) -> bool:
    """Whether `point` is what MLflow shows of its metric; an earlier evaluation may have had its value, and another since."""
    history = client.get_metric_history(run_id, point.key)
    latest = max(history, key=lambda old: (old.step, old.timestamp, old.value), default=None)
    return latest is not None and (latest.step, latest.value) == (point.step, point.value)
