"""Events of a job in a real SQLite database of MLflow: complete, and logged once, after resumption, repetition or failure."""

import os
import random
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow
import pytest
from mlflow import MlflowClient
from sqlalchemy import make_url

from model_registry.mlflow_types import DatasetRef
from model_registry.tracked_run import Points
from model_registry.tracking import Tracker, artifact_root, registry_uri, tracking_uri
from training.contract.errors import UsageError
from training.contract.protocol.events import Event, make_event

ABOUT: dict[str, Any] = {
    "experiment": "demo",
    "key": "a" * 64,
    "name": "policy aaaaaaaaaaaa",
    "params": {"training": {"loss": {"beta": 0.1}, "seed": 0}},
    "tags": {"pedigree.tokenized_pairs": "b" * 64, "dagster.run_id": "one"},
    "dataset": DatasetRef("c" * 64, "preferences.jsonl", {"train": 9, "validation": 1}),
}


def step(number: int, loss: float | None = None, at: float = 1000.0) -> Event:
    value = 1 / number if loss is None else loss
    return make_event("step", time=at + number, step=number, loss=value, **{"rewards/margins": number / 10})


def history(client: MlflowClient, run_id: str, name: str = "loss") -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri)


def test_tracking_uri_is_under_home_unless_the_environment_sets_it(tmp_path: Path):
    assert tracking_uri(tmp_path, {}) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": ""}) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": "http://tracking:5000"}) == "http://tracking:5000"
    assert artifact_root(tmp_path) == tmp_path / "mlflow" / "artifacts"


def test_registry_uri_is_the_tracking_uri_unless_the_environment_sets_it(tmp_path: Path):
    runs, models = {"MLFLOW_TRACKING_URI": "http://runs:5000"}, {"MLFLOW_REGISTRY_URI": "http://models:5000"}
    assert registry_uri(tmp_path, {}) == tracking_uri(tmp_path, {}) == tracking_uri(tmp_path, models)
    assert registry_uri(tmp_path, runs) == "http://runs:5000"
    assert registry_uri(tmp_path, runs | models) == "http://models:5000"
    with pytest.raises(UsageError, match=r"MLFLOW_REGISTRY_URI is 'databricks-uc'.*\[wrong-server-address\]"):
        registry_uri(tmp_path, {"MLFLOW_REGISTRY_URI": "databricks-uc"})


@pytest.mark.parametrize("name", ["what?", "a%20b"])
def test_tracking_uri_home_with_special_characters_raises(tmp_path: Path, name: str):
    with pytest.raises(UsageError, match=r"PEDIGREE_HOME is .*\[unsupported-path\]"):
        tracking_uri(tmp_path / name, {})
    for fine in ("100%", "a b", "a#b", "ä@b:c"):
        assert make_url(tracking_uri(tmp_path / fine, {})).database == str(tmp_path / fine / "mlflow/mlflow.db")


@pytest.mark.parametrize("uri", ["127.0.0.1:5000", "localhost:5000", "./mlruns", "databricks", "file:///runs"])
def test_tracking_uri_unsupported_address_raises(tmp_path: Path, uri: str):
    with pytest.raises(UsageError, match=rf"MLFLOW_TRACKING_URI is '{uri}'.*\[wrong-server-address\]"):
        tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": uri})


@pytest.mark.parametrize("uri", ["https://a.b", "postgresql+psycopg2://u@h/x"])
def test_tracking_uri_supported_address_is_kept(tmp_path: Path, uri: str):
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": uri}) == uri


def test_tracking_uri_folder_of_files_needs_mlflows_switch(tmp_path: Path):
    """Without its switch MLFLOW_ALLOW_FILE_STORE, MLflow refuses every request."""
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": "./mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}) == "./mlruns"


def test_run_logs_recipe_lineage_data_set_and_every_step(
    tracker: Tracker, client: MlflowClient, home: Path, warnings: list[str]
):
    with tracker.run(**ABOUT) as run:
        for number in (1, 2, 3):
            run.record(step(number))
        run.record(make_event("eval", time=1004.0, step=3, **{"eval/loss": 0.25}))
        run.record({"event": "phase", "time": 1005.0, "phase": "saving"})
    logged = client.get_run(run.run_id)
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "policy aaaaaaaaaaaa"
    assert logged.data.params == {"training.loss.beta": "0.1", "training.seed": "0"}
    assert {key: value for key, value in logged.data.tags.items() if not key.startswith("mlflow.")} == {
        "pedigree.key": "a" * 64,
        "pedigree.tokenized_pairs": "b" * 64,
        "dagster.run_id": "one",
    }
    assert [used.dataset.digest for used in logged.inputs.dataset_inputs] == ["c" * 36] * 2
    assert history(client, run.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert history(client, run.run_id, "eval/loss") == [(3, 0.25)]
    assert client.get_metric_history(run.run_id, "loss")[0].timestamp == 1_001_000
    assert logged.info.artifact_uri.startswith((home / "mlflow" / "artifacts" / "demo").as_uri())
    assert warnings == []


def test_run_resumed_training_continues_the_run(tracker: Tracker, client: MlflowClient):
    """Killed after step 3, and resumed from a checkpoint at 1: steps 2 and 3 come again, later, and more follow."""
    with pytest.raises(KeyboardInterrupt), tracker.run(**ABOUT) as first:
        for number in (1, 2, 3):
            first.record(step(number))
        raise KeyboardInterrupt
    assert client.get_run(first.run_id).info.status == "KILLED"
    again = {**ABOUT, "tags": {"dagster.run_id": "two"}, "params": {"training": {"seed": 0}, "compute": {"nodes": 2}}}
    with tracker.run(**again) as second:
        assert client.get_run(second.run_id).info.status == "RUNNING"
        for number in (1, 2, 3, 4):
            second.record(step(number, at=2000.0))
    logged = client.get_run(second.run_id)
    assert second.run_id == first.run_id
    assert history(client, second.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert logged.info.status == "FINISHED"
    assert (logged.data.tags["dagster.run_id"], logged.data.params["compute.nodes"]) == ("two", "2")
    assert len(logged.inputs.dataset_inputs) == 2


def test_replay_rewound_events_file_logs_each_step_once(tracker: Tracker, client: MlflowClient):
    with tracker.run(**ABOUT) as run:
        run.replay([step(1), step(2), step(3)])
        run.replay([step(1), step(2, loss=7.0, at=3000.0), step(4), step(4, loss=7.0)])
    assert history(client, run.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]


def test_points_are_a_set_of_a_byte_per_point():
    """Oracle: Python's set of the same points; 60,000 tuples take 100 bytes a point and more, here one."""
    chance = random.Random(0)
    added = [
        (name, chance.randrange(-5, 20_000)) for name in ("loss", "rewards/margins", "eval/loss") for _ in range(9000)
    ]
    points, known = Points(), set(added)
    points.update(added)
    queries = [(name, step) for name in ("loss", "rewards/margins", "eval/loss", "other") for step in range(-9, 20_010)]
    assert {point for point in queries if point in points} == known
    tracemalloc.start()
    many = Points()
    many.update((name, step) for name in ("loss", "rewards/margins", "grad_norm") for step in range(1, 20_001))
    traced_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert traced_bytes < 80_000, "a byte a point, plus 60 blocks"


@contextmanager
def refusing(table: str, uri: str) -> Iterator[None]:
    """Let the database refuse inserts into `table`, as if its disk were full."""
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        database.execute(f"CREATE TRIGGER away BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'away'); END")
        yield
        database.execute("DROP TRIGGER away")


def test_run_delivers_events_after_an_outage(tracker: Tracker, client: MlflowClient, uri: str):
    """One outage hits the description of the new run, another one its metrics."""
    with ExitStack() as stack:
        with refusing("params", uri):
            run = stack.enter_context(tracker.run(**ABOUT))
        run.replay([step(1)])
        with refusing("metrics", uri):
            run.replay([step(2), step(3)])
        assert history(client, run.run_id) == [(1, 1.0)]
        run.replay([step(4)])
        assert history(client, run.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert len(client.get_run(run.run_id).data.params) == 2


def test_run_failed_job_marks_the_run_and_raises(tracker: Tracker, client: MlflowClient):
    with pytest.raises(ValueError, match="out of memory"), tracker.run(**ABOUT) as run:
        run.record(step(1))
        raise ValueError("out of memory")
    assert client.get_run(run.run_id).info.status == "FAILED"
    assert tracker.find_run("demo", "a" * 64) is None, "the run is incomplete"


def test_run_other_key_or_experiment_is_another_run(tracker: Tracker):
    ids = []
    for change in ({}, {"key": "d" * 64}, {"experiment": "other"}):
        with tracker.run(**{**ABOUT, **change}) as run:
            ids.append(run.run_id)
    assert len(set(ids)) == 3
    assert tracker.find_run("demo", "a" * 64) == ids[0]
    assert tracker.find_run("other", "a" * 64) == ids[2]
    assert tracker.find_run("demo", "e" * 64) is None
    assert tracker.find_run("none", "a" * 64) is None


def test_run_non_finite_metric_is_skipped_with_a_warning(tracker: Tracker, client: MlflowClient, warnings: list[str]):
    with tracker.run(**ABOUT) as run:
        run.replay([step(1), step(2, loss=float("nan")), step(3, loss=float("inf")), step(4)])
    assert history(client, run.run_id) == [(1, 1.0), (4, 0.25)]
    assert len(history(client, run.run_id, "rewards/margins")) == 4
    [warning] = warnings
    assert "loss is nan at step 2" in warning


def test_run_logs_many_steps_and_parameters_in_batches(tracker: Tracker, client: MlflowClient):
    params = {"section": {f"field_{index}": index for index in range(150)}}
    with tracker.run(**{**ABOUT, "params": params}) as run:
        for number in range(1, 1201):
            run.record(step(number))
    assert [number for number, _ in history(client, run.run_id)] == list(range(1, 1201))
    assert len(client.get_run(run.run_id).data.params) == 150


def test_run_logs_steps_during_training(tracker: Tracker, client: MlflowClient):
    with tracker.run(**ABOUT) as run:
        run.record(step(1))
        time.sleep(2.1)
        run.record(step(2))
        assert [number for number, _ in history(client, run.run_id)] == [1, 2]


def test_run_restores_a_deleted_experiment(tracker: Tracker, client: MlflowClient):
    with tracker.run(**ABOUT) as first:
        first.record(step(1))
    client.delete_experiment(client.get_experiment_by_name("demo").experiment_id)
    with tracker.run(**ABOUT) as second:
        second.record(step(2))
    assert second.run_id == first.run_id
    assert history(client, second.run_id) == [(1, 1.0), (2, 0.5)]


def test_experiment_id_exists_from_the_first_run_until_deletion(tracker: Tracker, client: MlflowClient):
    assert tracker.experiment_id("demo") is None
    with tracker.run(**ABOUT):
        pass
    assert tracker.experiment_id("demo") == client.get_experiment_by_name("demo").experiment_id
    client.delete_experiment(tracker.experiment_id("demo"))
    assert tracker.experiment_id("demo") is None


def test_log_evaluation_adds_it_to_the_finished_run_once(
    tracker: Tracker, client: MlflowClient, tmp_path: Path, warnings: list[str]
):
    """Another evaluation of the same policy adds a value, and so does a return to the first one: MLflow shows the last."""
    (report := tmp_path / "report.html").write_text("<p>better</p>")
    with tracker.run(**ABOUT) as run:
        pass
    first = {"eval/loss": 0.25, "eval/pairs": 10, "eval/rewards/margins": float("nan")}
    for identity, metrics in (("a", first), ("a", first), ("b", {"eval/loss": 0.125}), ("a", first)):
        assert tracker.log_evaluation(run.run_id, identity, metrics, 3, report)
        assert client.get_run(run.run_id).data.metrics["eval/loss"] == metrics["eval/loss"]
    assert history(client, run.run_id, "eval/loss") == [(3, 0.125), (3, 0.25), (3, 0.25)]
    assert history(client, run.run_id, "eval/pairs") == [(3, 10.0)]
    assert client.get_run(run.run_id).info.status == "FINISHED"
    assert len(warnings) == 2 and all("eval/rewards/margins" in warning for warning in warnings)
    assert [entry.path for entry in client.list_artifacts(run.run_id, "evaluation")] == ["evaluation/report.html"]


def test_log_evaluation_after_an_outage_arrives_once(
    tracker: Tracker, client: MlflowClient, tmp_path: Path, warnings: list[str]
):
    """A plain file in place of the artifacts' folder blocks the report.

    The last text is not sent, as the identity is the same.
    """
    report = tmp_path / "report.html"
    report.write_text("first")
    with tracker.run(**ABOUT) as run:
        pass
    artifacts = Path(unquote(urlsplit(client.get_run(run.run_id).info.artifact_uri).path))
    artifacts.parent.mkdir(parents=True, exist_ok=True)
    if artifacts.is_dir():
        artifacts.rmdir()
    artifacts.write_text("in the way")

    def deliver(identity: str) -> bool:
        return tracker.log_evaluation(run.run_id, identity, {"eval/loss": 0.25}, 3, report)

    assert not deliver("a")
    assert "log the evaluation" in warnings[0]
    artifacts.unlink()
    assert deliver("a")
    logged = artifacts / "evaluation" / "report.html"
    assert logged.read_text() == "first"
    report.write_text("not sent")
    assert deliver("a") and logged.read_text() == "first"
    report.write_text("second")
    assert deliver("b") and logged.read_text() == "second"
    assert history(client, run.run_id, "eval/loss") == [(3, 0.25)], "its metrics arrived at the first attempt"


def test_run_unreadable_database_only_warns(tmp_path: Path, warnings: list[str]):
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 1000)
    with Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path, warnings.append).run(**ABOUT) as run:
        run.record(step(1))
    assert run.run_id is None
    assert len(warnings) == 2, "one at the first failure, one at the end"
    assert "file is not a database" in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "has_client"), [({}, "False"), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, "True")]
)
def test_import_disables_mlflows_telemetry_by_default(environment: dict[str, str], has_client: str):
    """Variables of tests and CI are removed: with them MLflow sends nothing anyway."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    script = "import model_registry.tracking, mlflow.telemetry as t; print(t.get_telemetry_client() is not None)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{has_client}\n"


def test_run_leaves_the_process_unchanged(tracker: Tracker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No folder in the working directory, no environment variable, no tracking address of the process."""
    monkeypatch.chdir(tmp_path)
    before = (mlflow.get_tracking_uri(), mlflow.active_run(), dict(os.environ), set(tmp_path.iterdir()))
    with tracker.run(**ABOUT) as run:
        run.record(step(1))
    after = (mlflow.get_tracking_uri(), mlflow.active_run(), dict(os.environ), set(tmp_path.iterdir()))
    assert after == before
