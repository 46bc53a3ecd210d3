"""One tracked run: it collects events, delivers them in batches, and survives an outage of the server.

A metric is identified by its name and step, and is sent once. So a resumed training, a replayed events file and a batch with a
lost answer all give the same run. The first value of a step stays: training is deterministic, so a later one could differ only
in timings.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_registry.client import mlflow_api
from model_registry.client.settings import quiet
from model_registry.connection import Connection
from model_registry.mlflow_types import DatasetRef, dataset_inputs, is_finite, metrics_of
from training.contract.protocol.events import Event

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

# Pause between two deliveries, and after a failed one.
_DELIVER_SECONDS = 2.0
_RETRY_SECONDS = 30.0
_METRICS_A_BATCH = 500
_STEPS_A_BLOCK = 1024

Point = tuple[str, int]


@dataclass(frozen=True)
class RunPlan:
    """The description of a new run."""

    name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    dataset: DatasetRef | None


class Points:
    """A set of points in a byte each: as tuples, the points of a million steps would take gigabytes."""

    def __init__(self) -> None:
        self._blocks: defaultdict[Point, bytearray] = defaultdict(lambda: bytearray(_STEPS_A_BLOCK))

    def update(self, points: Iterable[Point]) -> None:
        for name, step in points:
            block, offset = divmod(step, _STEPS_A_BLOCK)
            self._blocks[name, block][offset] = True

    def __contains__(self, point: Point) -> bool:
        block, offset = divmod(point[1], _STEPS_A_BLOCK)
        return bool(self._blocks[point[0], block][offset])


class TrackedRun:
    """The run found or made by `open_run` as soon as the server answers; until then `run_id` is None.

    No method raises because of the server. It warns at the first failure, and at the end if events are missing.
    """

    def __init__(self, connection: Connection, open_run: "Callable[[], Run]", plan: RunPlan) -> None:
        self.run_id: str | None = None
        self._connection, self._open_run, self._plan = connection, open_run, plan
        self._pending: dict[Point, Metric] = {}
        self._delivered = Points()
        self._not_finite: set[str] = set()
        self._next_delivery = 0.0

    def record(self, event: Event) -> None:
        """Take an event, and deliver the pending ones every two seconds."""
        self._take(event)
        if time.monotonic() >= self._next_delivery:
            self.flush()

    def replay(self, events: Iterable[Event]) -> None:
        """Take many events at once, such as those in a file."""
        for event in events:
            self._take(event)
        self.flush()

    def flush(self) -> None:
        """Deliver what is pending."""
        done = self._connection.try_request("log this run; training goes on, events are kept", self._deliver)
        self._next_delivery = time.monotonic() + (_DELIVER_SECONDS if done else _RETRY_SECONDS)

    def finish(self, status: str) -> None:
        """Deliver what is pending and set the run's final state: FINISHED, FAILED or KILLED."""

        def work(client: "MlflowClient") -> None:
            self._deliver(client)
            with quiet():
                client.set_terminated(self.run_id, status)

        self._connection.try_request(f"finish this run as {status}; replay its events later", work)

    def _take(self, event: Event) -> None:
        for metric in metrics_of(event):
            point = (metric.key, metric.step)
            if is_finite(metric):
                if point not in self._delivered:
                    self._pending.setdefault(point, metric)
            elif metric.key not in self._not_finite:
                self._not_finite.add(metric.key)
                self._connection.warn(f"not logged to MLflow: {metric.key} is {metric.value} at step {metric.step}")

    def _deliver(self, client: "MlflowClient") -> str | None:
        """Deliver all pending metrics. Return the run's id."""
        if self.run_id is None:
            self._begin(client, self._open_run())
        pending = list(self._pending)
        for start in range(0, len(pending), _METRICS_A_BATCH):
            points = pending[start : start + _METRICS_A_BATCH]
            client.log_batch(self.run_id, metrics=[self._pending[point] for point in points])
            self._delivered.update(points)
            for point in points:
                del self._pending[point]
        return self.run_id

    def _begin(self, client: "MlflowClient", run: "Run") -> None:
        """Describe a new run. For a continued one, find out which metrics it already has."""
        run_id = str(run.info.run_id)
        client.update_run(run_id, status="RUNNING")
        missing = [
            mlflow_api.Param(name, value) for name, value in self._plan.params.items() if name not in run.data.params
        ]
        tags = [mlflow_api.RunTag(name, value) for name, value in self._plan.tags.items()]
        client.log_batch(run_id, params=missing, tags=tags)  # the client cuts them into requests of a hundred
        if self._plan.dataset is not None and not run.inputs.dataset_inputs:
            client.log_inputs(run_id, datasets=dataset_inputs(self._plan.dataset))
        for key in run.data.metrics:
            self._delivered.update((key, old.step) for old in client.get_metric_history(run_id, key))
        self._pending = {point: new for point, new in self._pending.items() if point not in self._delivered}
        self.run_id = run_id
