"""Events of a job in a real SQLite database of MLflow: complete, once each, whatever is resumed, repeated or broken."""

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

ABOUT: dict[str, Any] = {
    "experiment": "demo",
    "key": "a" * 64,
    "name": "policy aaaaaaaaaaaa",
    "params": {"training": {"loss": {"beta": 0.1}, "seed": 0}},
    "tags": {"pedigree.tokenized_pairs": "b" * 64, "dagster.run_id": "one"},
    "dataset": DatasetRef("demo", "c" * 64, "preferences.jsonl", {"train": 9, "validation": 1}),
}


def step(number: int, loss: float | None = None, at: float = 1000.0) -> dict[str, Any]:
    value = 1 / number if loss is None else loss
    return {"event": "step", "time": at + number, "step": number, "loss": value, "rewards/margins": number / 10}


def history(client: MlflowClient, run_id: str, name: str = "loss") -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri)


def test_the_default_place_is_under_home_and_the_environment_names_another(tmp_path: Path):
    assert tracking_uri(tmp_path, {}) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": ""}) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": "http://tracking:5000"}) == "http://tracking:5000"
    assert artifact_root(tmp_path) == tmp_path / "mlflow" / "artifacts"


def test_the_registry_is_where_the_runs_are_unless_the_environment_names_another_place(tmp_path: Path):
    runs, models = {"MLFLOW_TRACKING_URI": "http://runs:5000"}, {"MLFLOW_REGISTRY_URI": "http://models:5000"}
    assert registry_uri(tmp_path, {}) == tracking_uri(tmp_path, {}) == tracking_uri(tmp_path, models)
    assert registry_uri(tmp_path, runs) == "http://runs:5000"
    assert registry_uri(tmp_path, runs | models) == "http://models:5000"
    with pytest.raises(UsageError, match="MLFLOW_REGISTRY_URI is 'databricks-uc'; expected a server's or a database's"):
        registry_uri(tmp_path, {"MLFLOW_REGISTRY_URI": "databricks-uc"})


@pytest.mark.parametrize("name", ["what?", "a%20b"])
def test_a_home_that_the_address_of_a_database_would_change_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UsageError, match=r"PEDIGREE_HOME is .*; a `\?`, or a `%` .*: name another folder"):
        tracking_uri(tmp_path / name, {})
    for fine in ("100%", "a b", "a#b", "ä@b:c"):
        assert make_url(tracking_uri(tmp_path / fine, {})).database == str(tmp_path / fine / "mlflow/mlflow.db")


@pytest.mark.parametrize("uri", ["127.0.0.1:5000", "localhost:5000", "./mlruns", "databricks", "file:///runs"])
def test_an_address_that_can_never_answer_is_wrong_use_before_anything_is_trained(tmp_path: Path, uri: str):
    with pytest.raises(
        UsageError, match=rf"MLFLOW_TRACKING_URI is '{uri}'; expected .* http://host:5000 or sqlite:////"
    ):
        tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": uri})


@pytest.mark.parametrize("uri", ["https://a.b", "postgresql+psycopg2://u@h/x"])
def test_what_mlflow_takes_is_taken(tmp_path: Path, uri: str):
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": uri}) == uri


def test_a_folder_of_files_is_taken_from_who_has_chosen_it(tmp_path: Path):
    """By MLflow's own switch: without it every request is refused."""
    assert tracking_uri(tmp_path, {"MLFLOW_TRACKING_URI": "./mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}) == "./mlruns"


def test_a_run_holds_recipe_lineage_data_set_and_every_step(
    tracker: Tracker, client: MlflowClient, home: Path, warnings: list[str]
):
    with tracker.run(**ABOUT) as run:
        for number in (1, 2, 3):
            run.record(step(number))
        run.record({"event": "eval", "time": 1004.0, "step": 3, "eval/loss": 0.25})
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
    assert [used.dataset.digest for used in logged.inputs.dataset_inputs] == ["c" * 36]
    assert history(client, run.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert history(client, run.run_id, "eval/loss") == [(3, 0.25)]
    assert client.get_metric_history(run.run_id, "loss")[0].timestamp == 1_001_000
    assert logged.info.artifact_uri.startswith((home / "mlflow" / "artifacts" / "demo").as_uri())
    assert warnings == []


def test_a_resumed_training_continues_its_run(tracker: Tracker, client: MlflowClient):
    """Killed after step 3, resumed from a checkpoint at 1: steps 2 and 3 come again, later and then some."""
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
    assert len(logged.inputs.dataset_inputs) == 1


def test_a_rewound_events_file_adds_no_step_twice(tracker: Tracker, client: MlflowClient):
    with tracker.run(**ABOUT) as run:
        run.replay([step(1), step(2), step(3)])
        run.replay([step(1), step(2, loss=7.0, at=3000.0), step(4), step(4, loss=7.0)])
    assert history(client, run.run_id) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]


def test_points_are_a_set_that_a_long_run_can_afford():
    """Oracle: Python's set of the same points, for which 60,000 tuples take 100 bytes a point and more; here it is one."""
    chance = random.Random(0)
    given = [
        (name, chance.randrange(-5, 20_000)) for name in ("loss", "rewards/margins", "eval/loss") for _ in range(9000)
    ]
    points, known = Points(), set(given)
    points.update(given)
    asked = [(name, step) for name in ("loss", "rewards/margins", "eval/loss", "other") for step in range(-9, 20_010)]
    assert {point for point in asked if point in points} == known
    tracemalloc.start()
    many = Points()
    many.update((name, step) for name in ("loss", "rewards/margins", "grad_norm") for step in range(1, 20_001))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 80_000, "a byte a point, and what 60 blocks need"


@contextmanager
def refusing(table: str, uri: str) -> Iterator[None]:
    """The database takes nothing more into `table`, as if its disk were full."""
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        database.execute(f"CREATE TRIGGER away BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'away'); END")
        yield
        database.execute("DROP TRIGGER away")


def test_what_an_outage_kept_away_is_delivered_when_it_is_over(tracker: Tracker, client: MlflowClient, uri: str):
    """Once when the run is there and is to be described, and once while it is fed."""
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


def test_a_failure_of_the_job_is_the_state_of_the_run_and_goes_on_its_way(tracker: Tracker, client: MlflowClient):
    with pytest.raises(ValueError, match="out of memory"), tracker.run(**ABOUT) as run:
        run.record(step(1))
        raise ValueError("out of memory")
    assert client.get_run(run.run_id).info.status == "FAILED"
    assert tracker.find_run("demo", "a" * 64) is None, "it has not all that it was to have"


def test_another_key_or_recipe_is_another_run(tracker: Tracker):
    ids = []
    for change in ({}, {"key": "d" * 64}, {"experiment": "other"}):
        with tracker.run(**{**ABOUT, **change}) as run:
            ids.append(run.run_id)
    assert len(set(ids)) == 3
    assert tracker.find_run("demo", "a" * 64) == ids[0]
    assert tracker.find_run("other", "a" * 64) == ids[2]
    assert tracker.find_run("demo", "e" * 64) is None
    assert tracker.find_run("none", "a" * 64) is None


def test_a_metric_that_is_not_finite_is_left_out_with_a_word(
    tracker: Tracker, client: MlflowClient, warnings: list[str]
):
    with tracker.run(**ABOUT) as run:
        run.replay([step(1), step(2, loss=float("nan")), step(3, loss=float("inf")), step(4)])
    assert history(client, run.run_id) == [(1, 1.0), (4, 0.25)]
    assert len(history(client, run.run_id, "rewards/margins")) == 4
    assert warnings == ["not logged to MLflow: loss is nan at step 2"]


def test_many_steps_and_parameters_go_in_batches(tracker: Tracker, client: MlflowClient):
    params = {"section": {f"field_{index}": index for index in range(150)}}
    with tracker.run(**{**ABOUT, "params": params}) as run:
        for number in range(1, 1201):
            run.record(step(number))
    assert [number for number, _ in history(client, run.run_id)] == list(range(1, 1201))
    assert len(client.get_run(run.run_id).data.params) == 150


def test_steps_are_seen_while_training_goes_on(tracker: Tracker, client: MlflowClient):
    with tracker.run(**ABOUT) as run:
        run.record(step(1))
        time.sleep(2.1)
        run.record(step(2))
        assert [number for number, _ in history(client, run.run_id)] == [1, 2]


def test_an_experiment_that_was_deleted_by_hand_comes_back(tracker: Tracker, client: MlflowClient):
    with tracker.run(**ABOUT) as before:
        before.record(step(1))
    client.delete_experiment(client.get_experiment_by_name("demo").experiment_id)
    with tracker.run(**ABOUT) as after:
        after.record(step(2))
    assert after.run_id == before.run_id
    assert history(client, after.run_id) == [(1, 1.0), (2, 0.5)]


def test_an_experiment_has_an_id_from_its_first_run_until_it_is_deleted(tracker: Tracker, client: MlflowClient):
    assert tracker.experiment_id("demo") is None
    with tracker.run(**ABOUT):
        pass
    assert tracker.experiment_id("demo") == client.get_experiment_by_name("demo").experiment_id
    client.delete_experiment(tracker.experiment_id("demo"))
    assert tracker.experiment_id("demo") is None


def test_the_evaluation_is_added_to_the_finished_run_once(
    tracker: Tracker, client: MlflowClient, tmp_path: Path, warnings: list[str]
):
    """Another evaluation of the same policy is another value, and so is the first that comes back: the last is shown."""
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
    assert warnings == ["not logged to MLflow, since not finite: eval/rewards/margins"] * 2
    assert [entry.path for entry in client.list_artifacts(run.run_id, "evaluation")] == ["evaluation/report.html"]


def test_an_evaluation_that_an_outage_kept_away_arrives_later_and_once(
    tracker: Tracker, client: MlflowClient, tmp_path: Path, warnings: list[str]
):
    """While the artifacts' folder is a plain file no report can be written there. The last text is not sent: same identity."""
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
    assert "cannot log the evaluation" in warnings[0]
    artifacts.unlink()
    assert deliver("a")
    logged = artifacts / "evaluation" / "report.html"
    assert logged.read_text() == "first"
    report.write_text("not sent")
    assert deliver("a") and logged.read_text() == "first"
    report.write_text("second")
    assert deliver("b") and logged.read_text() == "second"
    assert history(client, run.run_id, "eval/loss") == [(3, 0.25)], "its metrics arrived at the first attempt"


def test_a_database_that_cannot_be_opened_stops_no_training(tmp_path: Path, warnings: list[str]):
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 1000)
    with Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path, warnings.append).run(**ABOUT) as run:
        run.record(step(1))
    assert run.run_id is None
    assert len(warnings) == 2, "one at the first failure, one at the end"
    assert "file is not a database" in warnings[0]


@pytest.mark.parametrize(("environment", "told"), [({}, "False"), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, "True")])
def test_the_makers_of_mlflow_are_told_nothing_unless_a_person_says_so(environment: dict[str, str], told: str):
    """Without the variables of a test or of CI, in which MLflow is silent anyway."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    script = "import model_registry.tracking, mlflow.telemetry as t; print(t.get_telemetry_client() is not None)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{told}\n"


def test_nothing_of_the_process_is_changed(tracker: Tracker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No folder where the process stands, no environment variable, no tracking address of the process."""
    monkeypatch.chdir(tmp_path)
    before = (mlflow.get_tracking_uri(), mlflow.active_run(), dict(os.environ), set(tmp_path.iterdir()))
    with tracker.run(**ABOUT) as run:
        run.record(step(1))
    after = (mlflow.get_tracking_uri(), mlflow.active_run(), dict(os.environ), set(tmp_path.iterdir()))
    assert after == before
