"""The records in a SQLite file, read without MLflow. The oracle is MLflow's client."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from model_registry.client.records import ClientRecords, Records
from model_registry.client.sqlite_records import SCHEMAS, SqliteRecords, sqlite_records
from model_registry.connection import Connection

NAMES = ("plain", "bare", "prompt", "absent")


@pytest.fixture
def client(uri: str) -> MlflowClient:
    """A client of a database with runs and versions, some of them deleted."""
    client = MlflowClient(uri, registry_uri=uri)
    experiments = [client.create_experiment(name) for name in ("kept", "deleted")]
    runs = []
    for experiment in experiments:
        for key in ("a", "a", "b", "a"):
            runs.append(client.create_run(experiment, tags={"key": key, "it's": "100% `odd`"}).info.run_id)
            time.sleep(0.002)  # runs are in the order of their start
    client.set_terminated(runs[0], "FINISHED")
    client.delete_run(runs[3])
    client.delete_experiment(experiments[1])
    for name in ("plain", "bare"):
        client.create_registered_model(name)
    for number in range(12):
        tags = {"number": str(number), "text": "a\nb"} if number % 2 else {}
        client.create_model_version("plain", f"file:///files/{number}", runs[0], tags=tags)
    client.register_prompt("prompt", "Name a {{thing}}.")
    client.set_registered_model_alias("plain", "champion", "11")
    client.set_registered_model_alias("plain", "candidate", "12")
    client.delete_model_version("plain", "5")
    return client


def answers(records: Records) -> list[object]:
    runs = [records.runs(experiment, "key", key) for experiment in ("kept", "deleted", "no") for key in "abc"]
    found = [run for group in runs for run in group]
    return [
        runs,
        [records.run(run.run_id) for run in found],
        [records.aliases(name) for name in NAMES],
        [records.versions(name) for name in (*NAMES, None)],
        [records.version("plain", str(number)) for number in (1, 4, 12)],
    ]


def test_sqlite_records_are_those_of_the_client(client: MlflowClient, uri: str):
    with sqlite_records(uri) as records:
        assert isinstance(records, SqliteRecords)
        assert answers(records) == answers(ClientRecords(client))
        for missing in ("5", "13"):
            with pytest.raises(LookupError, match=f"name=plain, version={missing}"):
                records.version("plain", missing)
        with pytest.raises(LookupError, match="no-such-run"):
            records.run("no-such-run")


def test_schema_of_the_installed_mlflow_is_known(migrated_database: Path):
    """If this fails after an upgrade of MLflow: compare the columns in sqlite_records.py, then add its revision there."""
    with closing(sqlite3.connect(migrated_database)) as database:
        [(revision,)] = database.execute("SELECT version_num FROM alembic_version")
    assert revision in SCHEMAS


def test_unknown_schema_is_left_to_the_client(client: MlflowClient, uri: str):
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'of_tomorrow'")
    with sqlite_records(uri) as records:
        assert records is None


@pytest.mark.parametrize("text", [None, b"", b"no database"], ids=["missing", "empty", "damaged"])
def test_file_without_tables_is_left_to_the_client(text: bytes | None, tmp_path: Path):
    file = tmp_path / "mlflow.db"
    if text is not None:
        file.write_bytes(text)
    with sqlite_records(f"sqlite:///{file}") as records:
        assert records is None
    assert file.exists() == (text is not None)


def test_workspaces_are_left_to_the_client(client: MlflowClient, uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")
    with sqlite_records(uri) as records:
        assert records is None


def test_reading_an_empty_home_makes_its_tables(tmp_path: Path):
    connection = Connection(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with connection.reading("look for versions") as records:
        assert records.versions(None) == []
    with connection.reading("look for versions") as records:
        assert isinstance(records, SqliteRecords)
