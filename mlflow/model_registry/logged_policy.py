"""A policy as a logged model of MLflow: the link between its run, held-out metrics, data sets, files and versions.

MLflow 3 shows a logged model on a page of its own. A version has one logged model, found by the version's identity. So an
interrupted release continues with the model it began.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from model_registry.client import mlflow_api
from model_registry.client.settings import without_retries
from model_registry.connection import Connection
from model_registry.mlflow_types import HELD_OUT, tags_of
from model_registry.model_version import Version

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

_NOT_IN_NAMES = re.compile(r"[/:.%\"']")  # a registered model may have them
_MODEL_TYPE = "preference-tuned policy"


class LoggedPolicy:
    """The logged model of the version of `name` with the tags `identity`, trained in `run_id`. Made on first use.

    Its methods raise RegistryError.
    """

    def __init__(self, runs: Connection, run_id: str, name: str, identity: Mapping[str, str]) -> None:
        self._runs, self._run_id, self._identity = runs, run_id, tags_of(identity)
        self._name = _NOT_IN_NAMES.sub("_", name)

    @property
    def source(self) -> str:
        """The address of its files."""
        return str(self._model.artifact_location)

    @property
    def model_id(self) -> str:
        return str(self._model.model_id)

    def finish(self) -> None:
        """Give the model the run's held-out metrics, link it from the run, and mark it as ready."""
        if self._model.status == mlflow_api.LoggedModelStatus.READY:
            return
        with self._runs.asking(f"describe the model of {self._name}") as client:
            run = client.get_run(self._run_id)
            digests = [used.dataset.digest for used in run.inputs.dataset_inputs if used.dataset.name == HELD_OUT]
            held_out: dict[str, Any] = {"dataset_name": HELD_OUT, "dataset_digest": digests[0]} if digests else {}
            # With the time stamps of the run, so that the run gets no second point.
            metrics = [
                mlflow_api.Metric(
                    metric.key,
                    metric.value,
                    metric.timestamp,
                    metric.step,
                    model_id=self.model_id,
                    run_id=self._run_id,
                    **held_out,
                )
                for metric in run.data._metric_objs
                if metric.key.startswith("eval/")
            ]
            client.log_batch(self._run_id, metrics=metrics)
            last_step = max((metric.step for metric in metrics), default=0)
            client.log_outputs(self._run_id, [mlflow_api.LoggedModelOutput(self.model_id, last_step)])
            client.finalize_logged_model(self.model_id, mlflow_api.LoggedModelStatus.READY)

    def link_version(self, version: Version) -> None:
        """Name the version on the model's page."""
        versions = [{"name": version.name, "version": version.number}]
        with self._runs.asking(f"link the model of {self._name}") as client:
            client.set_logged_model_tags(self.model_id, {mlflow_api.MLFLOW_MODEL_VERSIONS: json.dumps(versions)})

    @cached_property
    def _model(self) -> "LoggedModel":
        with self._runs.asking(f"find a place for the files of {self._name}") as client:
            run = client.get_run(self._run_id)
            experiment = run.info.experiment_id
            query = " AND ".join(f"tags.`{tag}` = '{value}'" for tag, value in self._identity.items())
            for model in client.search_logged_models([experiment], query):
                if model.source_run_id == self._run_id and model.name == self._name:
                    return model
            with without_retries():
                return client.create_logged_model(
                    experiment,
                    name=self._name,
                    source_run_id=self._run_id,
                    tags=self._identity,
                    params=run.data.params,
                    model_type=_MODEL_TYPE,
                )
