"""A server that is away in each of the ways servers are: real sockets on loopback, and what a person is told."""

import itertools
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy import create_engine
from sqlalchemy.dialects import registry
from sqlalchemy.exc import OperationalError

from model_registry.connection import (
    DEFAULT_PAGE,
    Connection,
    connect,
    is_away,
    note_address,
    page,
    reason,
    retry_while_unavailable,
    shown,
    without_retries,
)
from model_registry.registry import Registry
from training.contract.errors import RegistryError, RegistryUnavailable, StoreError
from training.contract.system.locks import is_held

Away = Callable[..., str]
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
FAULT = b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 45\r\n\r\n{"error_code": "INTERNAL_ERROR", "message":1}'


@pytest.fixture
def away() -> Iterator[Away]:
    """Makes a server that gives these answers, the last again and again, or lets everybody wait; gives its address."""
    listeners = []

    def start(*answers: bytes | None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=_serve, args=(listener, answers), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def _serve(listener: socket.socket, answers: tuple[bytes | None, ...]) -> None:
    waiting = []
    for answer in itertools.chain(answers, itertools.repeat(answers[-1])):
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if answer is None:
            waiting.append(connection)
            continue
        with connection:
            while connection.recv(65536):
                connection.sendall(answer)
                break


@pytest.mark.parametrize("answer", [UNAVAILABLE, UNAVAILABLE.replace(b"503", b"500"), FAULT])
def test_a_registry_that_answers_with_its_failure_is_told_with_what_to_do(away, tmp_path: Path, answer: bytes):
    """MLflow's own patience, seven retries with pauses that double, is four minutes; the test's limit is told in the error."""
    uri = away(answer)
    with pytest.raises(RegistryError) as told:
        Registry(uri, tmp_path).find_version("demo", {"a": "b"})
    message = str(told.value)
    assert message.startswith(f"MLflow at {uri} cannot look for versions of demo: no good answer in ")
    assert "nothing that was computed is lost: run again once it answers" in message
    assert float(re.search(r"in ([0-9.]+) s", message)[1]) < 10


@pytest.mark.parametrize("answer", [UNAVAILABLE, FAULT, b"", None], ids=["503", "500", "hangs up", "silent"])
def test_a_server_that_gives_no_answer_to_a_write_is_away(away, monkeypatch: pytest.MonkeyPatch, answer: bytes | None):
    """Since MLflow 3.18 its client does not repeat what it must not write twice, and has other words for what it got then."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    connection = Connection(away(answer))
    with (
        pytest.raises(RegistryUnavailable, match=r"cannot begin: no good answer in [0-9.]+ s \(.+\); nothing"),
        connection.asking("begin") as client,
        without_retries(),
    ):
        client.create_run("0")


def test_a_server_that_knows_no_such_address_is_not_waited_for(away):
    """Of another kind than MLflow's: its answer is an object too."""
    answer = b'HTTP/1.1 404 Not Found\r\nContent-Length: 23\r\n\r\n{"detail": "Not Found"}'
    connection = Connection(away(answer))
    with pytest.raises(RegistryError, match="Not Found") as told, connection.asking("look") as client:
        client.search_registered_models()
    assert type(told.value) is RegistryError


def test_a_server_that_never_answers_is_asked_once_not_ten_times(away, monkeypatch: pytest.MonkeyPatch):
    """A failure of a second is believed for a second, so the work that follows at once does not wait again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told: list[str] = []
    asked: list[MlflowClient] = []
    connection = Connection(away(None), told.append)

    def ask(client: MlflowClient) -> None:
        asked.append(client)
        client.search_experiments()

    started = time.monotonic()
    assert [connection.try_request("look", ask) for _ in range(10)] == [None] * 10
    assert len(asked) == len(told) == 1
    time.sleep(time.monotonic() - started)  # at least as long as the failure took
    assert not connection.try_request("look", ask) and len(asked) == 2


class NoCredentials(Exception):
    """As botocore has one, of no class that MLflow knows."""


def test_what_the_client_of_a_cloud_raises_is_told_as_all_else():
    """Its own exceptions reach us where MLflow leaves it to move files: with keys that are missing nobody has to wait."""
    connection, lost = Connection("http://127.0.0.1:9"), NoCredentials("Unable to locate credentials")
    with (
        pytest.raises(
            RegistryError, match=r"^MLflow at .* cannot download model: Unable to locate credentials$"
        ) as error,
        connection.asking("download model"),
    ):
        raise lost
    assert type(error.value) is RegistryError and error.value.__cause__ is lost


@pytest.mark.parametrize(
    "words",
    [
        'Could not connect to the endpoint URL: "http://127.0.0.1:5555/models/1"',
        'Connect timeout on endpoint URL: "http://files/models"',
        'Read timeout on endpoint URL: "http://files/models"',
        'Connection was closed before we received a valid response from endpoint URL: "http://files/models".',
    ],
)
def test_a_store_of_files_that_gives_no_answer_is_away(words: str):
    """The words are botocore's, with and without those of who called it."""
    assert is_away(ValueError(words)) and is_away(ValueError(f"Failed to upload a to b: {words}"))


def test_what_fails_at_once_is_tried_again_at_once():
    """A wrong request says nothing of the server. Whoever repeats it every second is told of it once, until it succeeds."""
    told: list[str] = []
    asked: list[MlflowClient] = []
    connection = Connection("http://127.0.0.1:9", told.append)

    def fail(client: MlflowClient) -> None:
        asked.append(client)
        raise ValueError("no such metric")

    assert not connection.try_request("look", fail)
    time.sleep(0.5)
    assert not connection.try_request("look", fail) and len(asked) == 2
    assert connection.try_request("find", lambda client: "found") == "found"
    assert not connection.try_request("look", fail) and len(told) == 1
    assert connection.try_request("look", lambda client: "seen") == "seen"
    assert not connection.try_request("look", fail) and len(told) == 2
    assert str(connection.failure) == told[1] == "MLflow at http://127.0.0.1:9 cannot look: no such metric"


def test_unrepeated_overrules_and_restores_the_patience_of_the_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    with without_retries():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"


def test_patience_is_restored_where_threads_overlap(monkeypatch: pytest.MonkeyPatch):
    """As sensors do in Dagster's code server, whose environment every run it starts inherits."""
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    inside, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with without_retries():
            inside.set()
            may_leave.wait(0.5)

    def second() -> None:
        inside.wait()
        with without_retries():
            may_leave.set()
            earlier.join(0.5)

    earlier, later = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (earlier, later):
        thread.start()
    for thread in (earlier, later):
        thread.join()
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_the_cause_behind_a_heading_is_told():
    """MLflow's words where a file of several cannot be fetched; of SQLAlchemy's several lines the first says it all."""
    failed = (
        "The following failures occurred while downloading one or more artifacts from s3://m:\n##### File a #####\n404"
    )
    assert reason(ValueError(failed), "http://h", 1.0).endswith(" from s3://m: ##### File a ##### 404")
    assert reason(ValueError("no such table: a\n[SQL: SELECT]\n(Background)"), "http://h", 1.0) == "no such table: a"


def test_no_password_is_in_a_message():
    """Not even one with an @ in it, nor in the words of the library below."""
    uri = "postgresql://me:p@ss@host/runs"
    assert (
        shown(uri) == "postgresql://host/runs"
        and shown("sqlite:////home/a@b/mlflow.db") == "sqlite:////home/a@b/mlflow.db"
    )
    assert shown("postgresql://me:p/w?o#rd@host/runs") == "postgresql://host/runs", "as SQLAlchemy takes it"
    assert shown("mysql+pymysql://host/runs?user=me&password=secret&charset=x") == (
        "mysql+pymysql://host/runs?user=me&password=...&charset=x"
    )
    assert reason(ValueError(f"cannot open {uri}"), uri, 1.0) == "cannot open postgresql://host/runs"


def test_no_password_is_in_what_caused_an_error():
    """Dagster stores and shows every cause. Port 9 of loopback refuses at once, and MLflow's own words have the address."""
    connection = Connection("http://me:secret@127.0.0.1:9")
    with pytest.raises(RegistryUnavailable) as told, connection.asking("look for models") as client:
        client.search_registered_models()
    assert "secret" not in "".join(traceback.format_exception(told.value))


def test_links_of_a_database_lead_where_its_pages_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("PEDIGREE_MLFLOW_UI", raising=False)
    assert page(uri, "runs").startswith(f"{DEFAULT_PAGE}/#/runs?")
    note_address(uri, "http://127.0.0.1:41234")
    assert page(uri, "runs").startswith("http://127.0.0.1:41234/#/runs?")
    monkeypatch.setenv("PEDIGREE_MLFLOW_UI", "https://mlflow.example.org/")
    assert page(uri, "runs").startswith("https://mlflow.example.org/#/runs?")
    assert page("http://tracking:5000", "runs").startswith("http://tracking:5000/#/runs?")


def test_permissions_of_what_is_there_stay_as_they_are(tmp_path: Path, migrated_database: Path):
    """Whoever keeps MLflow's file in a folder of his own has things there that are nobody else's."""
    private = [tmp_path / name for name in ("mlflow.db", "cookies.db", "deep/secrets.db")]
    (tmp_path / "deep").mkdir()
    shutil.copy(migrated_database, private[0])
    for path in private:
        path.touch()
        path.chmod(0o600)
    connect(f"sqlite:///{private[0]}")
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600] * 3


def test_the_address_of_a_file_may_have_options(tmp_path: Path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?timeout=60"
    assert [each.name for each in connect(uri).search_experiments()] == ["Default"]
    note_address(uri, "http://127.0.0.1:41234")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock", "served-at.txt"]


def test_tables_that_a_killed_process_did_not_finish_are_made_again(tmp_path: Path):
    """SIGKILL while MLflow makes its tables, of about 950 kB."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    making = subprocess.Popen(
        [sys.executable, "-c", f"from model_registry.connection import connect; connect({uri!r})"]
    )
    is_half_made = False
    while not is_half_made:
        assert making.poll() is None
        time.sleep(0.01)
        with suppress(FileNotFoundError):  # a journal comes and goes
            is_half_made = any(100_000 < file.stat().st_size < 800_000 for file in tmp_path.glob("mlflow.db*"))
    making.kill()
    making.wait()
    assert [each.name for each in connect(uri).search_experiments()] == ["Default"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_a_database_is_opened_by_one_process_at_a_time(
    tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
):
    """Opening one that an older MLflow made gives it the tables that are new: of three processes at once, one failed."""
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    held: list[bool] = []

    def opened(uri: str, registry_uri: str) -> MlflowClient:
        held.append(is_held(tmp_path / "mlflow.db.lock"))
        return MlflowClient(uri, registry_uri)

    monkeypatch.setattr("model_registry.connection.MlflowClient", opened)
    connect(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert held == [True] and not is_held(tmp_path / "mlflow.db.lock")


def test_a_database_that_others_hold_for_long_is_away(tmp_path: Path):
    """The words are SQLite's own."""
    database = tmp_path / "busy.db"
    engine = create_engine(f"sqlite:///{database}", connect_args={"timeout": 0.01})
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OperationalError) as found, engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE runs (id)")
    assert is_away(MlflowException(found.value))
    assert not is_away(MlflowException("(sqlite3.OperationalError) no such table: runs"))


@pytest.mark.parametrize(
    "words",
    [
        '(psycopg2.OperationalError) connection to server at "db" failed: Connection refused',
        "(psycopg2.OperationalError) server closed the connection unexpectedly",
        '(psycopg2.OperationalError) connection to server at "db" failed: Connection refused',
        "(psycopg2.OperationalError) server closed the connection unexpectedly",
        "(pymysql.err.OperationalError) (2003, \"Can't connect to MySQL server on 'db' (timed out)\")",
        "(psycopg2.errors.AdminShutdown) terminating connection due to administrator command",
        "(psycopg.OperationalError) connection failed: FATAL:  the database system is starting up",
        '(psycopg2.OperationalError) connection to server at "db" failed: FATAL:  sorry, too many clients already',
        "(psycopg2.OperationalError) connection failed: FATAL:  remaining connection slots are reserved for superusers",
        "(psycopg.errors.QueryCanceled) canceling statement due to statement timeout",
        "(psycopg.errors.LockNotAvailable) canceling statement due to lock timeout",
        "(psycopg.errors.ConnectionTimeout) connection timeout expired",
        "(psycopg.OperationalError) failed to resolve host 'db': [Errno -2] Name or service not known",
        "(psycopg.OperationalError) the connection is lost",
        "TEMPORARILY_UNAVAILABLE: (psycopg2.errors.DeadlockDetected) deadlock detected",
        "(pymysql.err.OperationalError) (2003, \"Can't connect to MySQL server on 'db' (timed out)\")",
        "(pymysql.err.OperationalError) (2013, 'Lost connection to MySQL server during query')",
        "(pymysql.err.OperationalError) (1205, 'Lock wait timeout exceeded; try restarting transaction')",
    ],
)
def test_a_database_that_is_down_or_held_is_away(words: str):
    """In the words of Postgres, of MySQL and of their drivers, which are not installed here."""
    assert is_away(MlflowException(words))
    assert "nothing that was computed is lost: run again" in reason(MlflowException(words), "postgresql://db/runs", 1.0)


@pytest.mark.parametrize(
    "words",
    [
        '(psycopg.OperationalError) connection failed: connection to server at "db" failed: FATAL:  password authentication '
        'failed for user "me"',
        '(psycopg2.OperationalError) connection to server at "db" failed: FATAL:  database "runs" does not exist',
        "(psycopg.errors.InsufficientPrivilege) permission denied for table runs",
        "(psycopg.errors.ReadOnlySqlTransaction) cannot execute UPDATE in a read-only transaction",
    ],
)
def test_a_database_that_refuses_is_not_waited_for(words: str):
    assert not is_away(MlflowException(words)) and reason(MlflowException(words), "postgresql://db/runs", 1.0) == words


def test_a_database_that_does_not_answer_is_asked_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """MLflow alone would ask ten times, for 102 seconds, and log each. SQLite stands in for a driver of Postgres, which is not
    installed."""
    registry.register("postgresql.standin", "sqlalchemy.dialects.sqlite.pysqlite", "dialect")
    database = f"postgresql+standin:///{tmp_path / 'nowhere' / 'runs.db'}"
    with pytest.raises(RegistryError, match=r"cannot look for the champion of demo: .*unable to open database file"):
        Registry(database, tmp_path).champion("demo")
    assert not [record for record in caplog.records if record.name == "mlflow.store.db.utils"]


def test_an_address_that_is_none_is_told_in_words():
    with pytest.raises(
        RegistryError, match=r"'postgresql://db:port/runs', which is no address of a database: .*'port'"
    ):
        connect("postgresql://me:secret@db:port/runs")


def test_a_server_that_lets_nobody_connect_is_told_like_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A machine that is off, or behind a firewall: packets get no answer, as from a socket whose queue is full."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told = (
        r"no good answer in 1\.. s \(Connection to 127.0.0.1 timed out\. [^'\"]*\); nothing that was computed is lost"
    )
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
        pytest.raises(RegistryUnavailable, match=told),
    ):
        Registry(f"http://127.0.0.1:{full.getsockname()[1]}", tmp_path).champion("demo")


def test_a_server_that_restarts_is_waited_for_and_no_longer(away, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It answers from its third request on that there is no such model, as MLflow does."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    body = b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such model"}'
    unknown = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    told: list[str] = []
    back = Registry(away(UNAVAILABLE, UNAVAILABLE, unknown), tmp_path)
    assert retry_while_unavailable(lambda: back.champion("demo"), told.append) is None
    assert len(told) == 1 and told[0].startswith("waits up to 60 s for a server that may be restarting: MLflow at http")
    gone = Registry(away(UNAVAILABLE), tmp_path)
    with pytest.raises(RegistryUnavailable):
        retry_while_unavailable(lambda: gone.champion("demo"), told.append, seconds=0.5)
    with pytest.raises(RegistryError, match="is not an address of a model"):
        retry_while_unavailable(lambda: gone.resolve("demo"), told.append)
    assert len(told) == 2, "what is no outage is told at once"


def test_an_attempt_survives_whatever_fails(tmp_path: Path):
    """A home without room, say, when the database is opened: what is trained must not end for what is recorded of it."""
    told: list[str] = []
    connection = Connection(f"sqlite:///{tmp_path / 'none.db'}", told.append)

    def fail(client: MlflowClient) -> None:
        raise StoreError("no room in the home")

    assert not connection.try_request("record a step", fail)
    assert len(told) == 1 and "no room in the home" in told[0]
