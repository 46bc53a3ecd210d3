"""Tracking: one MLflow run for every policy, fed with the events of its training job.

Training writes events to a file and does not know MLflow. The reader of that file passes each event to `TrackedRun.record`. So
an outage of the tracking server costs only a warning: events are kept and delivered later, and `replay` logs a whole events
file. A run is found by the tag `pedigree.key`, the key of the policy's derivation, and continued: a resumed training adds the
missing steps.

By default, SQLite and a folder in Pedigree's home hold everything. MLFLOW_TRACKING_URI names another place, and
MLFLOW_REGISTRY_URI one for the registry alone.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import make_url

from model_registry.charts import ALL_RUNS, all_runs_view, chart_views
from model_registry.client import mlflow_api
from model_registry.client.records import Records, find_runs
from model_registry.client.settings import without_retries
from model_registry.connection import (
    PAGES_VARIABLE,
    REGISTRY_VARIABLE,
    TRACKING_VARIABLE,
    Connection,
    is_server,
    page,
    shown,
)
from model_registry.mlflow_types import DatasetRef, flatten, is_finite, tags_of
from model_registry.tracked_run import RunPlan, TrackedRun
from training.contract.errors import RegistryError, UsageError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

KEY_TAG = "pedigree.key"
CHARTS = "model-metrics"  # the name of a run's charts in MLflow's addresses
_EVALUATION_TAG = "pedigree.evaluation"
# The stores of MLflow with a registry; a folder of files only if the user set MLFLOW_ALLOW_FILE_STORE.
_SCHEMES = {"http", "https", "sqlite", "postgresql", "mysql", "mssql"}
_VERSIONED = re.compile(r" v\d+$")
_LOG = logging.getLogger(__name__)


def tracking_uri(home: Path, environ: Mapping[str, str]) -> str:
    """Return MLFLOW_TRACKING_URI if it is set, else the address of a SQLite file under `home`.

    Raises UsageError for an unsupported address. An unavailable server is noticed only at a request.
    """
    check_database_folder(home, "PEDIGREE_HOME")
    return _address(TRACKING_VARIABLE, environ) or f"sqlite:///{home.absolute()}/mlflow/mlflow.db"


def check_database_folder(folder: Path, variable: str) -> None:
    """Raise UsageError if SQLite would misread the address of a file in `folder`, the value of `variable`."""
    path = str(folder.absolute())
    if make_url(f"sqlite:///{path}").database != path:
        raise UsageError(
            f"{variable} is {folder}; a `?`, or a `%` before two hexadecimal digits, has another meaning in the address of a "
            "database: name another folder",
            "unsupported-path",
        )


def registry_uri(home: Path, environ: Mapping[str, str]) -> str:
    """Return MLFLOW_REGISTRY_URI if it is set, else the tracking address. Raises as `tracking_uri`."""
    return _address(REGISTRY_VARIABLE, environ) or tracking_uri(home, environ)


def _address(variable: str, environ: Mapping[str, str]) -> str:
    uri = environ.get(variable, "")
    if uri and uri.partition("://")[0].partition("+")[0] not in _SCHEMES and not environ.get("MLFLOW_ALLOW_FILE_STORE"):
        raise UsageError(
            f"{variable} is {shown(uri)!r}; expected the address of a server or a database, such as http://host:5000 or "
            "sqlite:////folder/mlflow.db",
            "wrong-server-address",
        )
    return uri


def artifact_root(home: Path) -> Path:
    """Return the folder of artifacts, unless a tracking server decides."""
    return home.absolute() / "mlflow" / "artifacts"


def charts_page(uri: str, experiment_id: str, view: str = ALL_RUNS) -> str:
    """Return the address of a view of an experiment's charts."""
    return page(uri, f"experiments/{experiment_id}/runs", {"viewStateShareKey": view, "compareRunsMode": "CHART"})


class Tracker:
    """Runs and their metrics on one tracking server or database, contacted on first use.

    `artifact_root` holds the artifacts of new experiments; a server uses its own. No method raises because of the server: it
    calls `warn`.
    """

    def __init__(
        self, tracking_uri: str, artifact_root: Path | None, warn: Callable[[str], None] = _LOG.warning
    ) -> None:
        self.tracking_uri = tracking_uri
        self._connection = Connection(tracking_uri, warn)
        self._artifact_root = None if is_server(tracking_uri) else artifact_root

    @property
    def failure(self) -> RegistryError | None:
        """The error of the last failed call."""
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
        recipe: str | None = None,
    ) -> Iterator[TrackedRun]:
        """Yield the run of the policy `key`, new or continued. Mark it finished, failed or killed at the end.

        The experiment's view of the latest run of `recipe`, by default the experiment's name, shows it from now on.
        """
        plan = RunPlan(name, flatten(params), {**tags_of(tags), KEY_TAG: key}, dataset)
        run = TrackedRun(self._connection, lambda: self._open(experiment, recipe or experiment, key, plan), plan)
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
        """Return the id of the policy's complete run: a finished one, with all its events.

        None if it is missing, or the server does not answer: then replay the events.
        """

        def work(records: Records) -> str | None:
            runs = records.runs(experiment, KEY_TAG, key)
            return next((run.run_id for run in runs if run.status == "FINISHED"), None)

        return self._connection.try_reading("look for a run", work)

    def experiment_id(self, name: str) -> str | None:
        """Return the id of an experiment. None if no experiment has that name, or the server does not answer.

        An experiment of an earlier version gets the view of all runs.
        """

        def work(client: "MlflowClient") -> str | None:
            found = client.get_experiment_by_name(name)
            if found is None or found.lifecycle_stage == "deleted":
                return None
            for tag, view in all_runs_view().items():
                if tag not in found.tags:
                    client.set_experiment_tag(found.experiment_id, tag, view)
            return str(found.experiment_id)

        return self._connection.try_request("look for an experiment", work)

    def tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Add tags to a run, finished or not. After an outage, the next call adds them."""
        added = tags_of(tags)

        def has_tags(records: Records) -> bool:
            return added.items() <= records.run(run_id).tags.items()

        def work(client: "MlflowClient") -> None:
            for name, value in added.items():
                client.set_tag(run_id, name, value)

        if not self._connection.try_reading("tag a run", has_tags):
            self._connection.try_request("tag a run", work)

    @property
    def is_served(self) -> bool:
        """Return whether links lead to a permanent server. If not, `pedigree ui` serves the pages."""
        return is_server(self.tracking_uri) or bool(os.environ.get(PAGES_VARIABLE))

    def run_link(self, run_id: str, part: str = CHARTS) -> str:
        """Return the address of a `part` of the run's page, by default its charts.

        If the server does not answer, return the address of its first page.
        """

        def work(records: Records) -> str:
            experiment_id = records.run(run_id).experiment_id
            return page(self.tracking_uri, f"experiments/{experiment_id}/runs/{run_id}/{part}")

        return self._connection.try_reading("find the page of a run", work) or page(self.tracking_uri)

    def charts_link(self, run_id: str, view: str = ALL_RUNS) -> str:
        """Return the address of a view of the charts of the run's experiment (model_registry.charts).

        If the server does not answer, return the address of its first page.
        """

        def work(records: Records) -> str:
            return charts_page(self.tracking_uri, records.run(run_id).experiment_id, view)

        return self._connection.try_reading("find the charts of a run", work) or page(self.tracking_uri)

    def rename_run(self, run_id: str, name: str) -> None:
        """Name a run after its version, finished or not. It keeps the name of an earlier version, also after an outage."""

        def work(client: "MlflowClient") -> None:
            if not _VERSIONED.search(client.get_run(run_id).info.run_name or ""):
                client.update_run(run_id, name=name)

        self._connection.try_request("name a run", work)

    def log_evaluation(self, run_id: str, identity: str, metrics: Mapping[str, float], step: int, report: Path) -> bool:
        """Add an evaluation to a run, finished or not: `metrics` at `step`, and `report`. Return whether the server has both.

        A tag, set last, holds the `identity` of the logged evaluation. So the next call after an outage delivers it, a
        repeated call costs one request, and an interrupted one adds no value twice.
        """

        def is_logged(records: Records) -> bool:
            return records.run(run_id).tags.get(_EVALUATION_TAG) == identity

        def work(client: "MlflowClient") -> bool:
            moment = round(time.time() * 1000)
            points = [mlflow_api.Metric(name, value, moment, step) for name, value in metrics.items()]
            new = [point for point in self._finite(points) if not _is_latest(client, run_id, point)]
            client.log_batch(run_id, metrics=new)
            client.log_artifact(run_id, str(report), "evaluation")
            client.set_tag(run_id, _EVALUATION_TAG, identity)
            return True

        what = "log the evaluation; a later run does"
        return bool(self._connection.try_reading(what, is_logged) or self._connection.try_request(what, work))

    def log_page(self, run_id: str, page: Path, folder: str) -> None:
        """Add a page to the artifacts of a run, in `folder`; it replaces an earlier one. An outage costs only a warning."""
        self._connection.try_request(f"log {page.name}", lambda client: client.log_artifact(run_id, str(page), folder))

    def _finite(self, points: "list[Metric]") -> "list[Metric]":
        if skipped := sorted(point.key for point in points if not is_finite(point)):
            self._connection.warn(f"not logged to MLflow, as not finite: {', '.join(skipped)}")
        return [point for point in points if is_finite(point)]

    def _open(self, experiment: str, recipe: str, key: str, plan: RunPlan) -> "Run":
        client = self._connection.client
        experiment_id = self._experiment(client, experiment)
        if runs := find_runs(client, experiment_id, KEY_TAG, key):  # two only if two processes began at the same moment
            run = runs[0]
        else:
            with without_retries():  # if the answer is lost, the next delivery finds the run
                run = client.create_run(experiment_id, tags={KEY_TAG: key}, run_name=plan.name)
        for tag, view in chart_views(recipe, str(run.info.run_id)).items():
            client.set_experiment_tag(experiment_id, tag, view)
        return run

    def _experiment(self, client: "MlflowClient", name: str) -> str:
        """Return the id of the experiment, new or not. Restore an experiment deleted by hand, with its runs."""
        found = client.get_experiment_by_name(name)
        if found is None:
            location = (self._artifact_root / name).as_uri() if self._artifact_root else None
            try:
                return str(client.create_experiment(name, artifact_location=location))
            except mlflow_api.MlflowException:
                found = client.get_experiment_by_name(name)
                if found is None:  # else another process made it meanwhile
                    raise
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)


def _is_latest(client: "MlflowClient", run_id: str, point: "Metric") -> bool:
    """Return whether `point` is the value MLflow shows for its metric.

    An evaluation may repeat an earlier value after another.
    """
    history = client.get_metric_history(run_id, point.key)
    latest = max(history, key=lambda old: (old.step, old.timestamp, old.value), default=None)
    return latest is not None and (latest.step, latest.value) == (point.step, point.value)
