"""All kinds of unavailable servers, as real sockets on loopback, and the messages for the user."""

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
from sqlalchemy.exc import DBAPIError, OperationalError

from model_registry.client.outages import is_away, is_corrupt
from model_registry.client.settings import without_retries
from model_registry.connection import (
    DEFAULT_PAGE,
    Connection,
    connect,
    note_address,
    page,
    reason,
    retry_while_unavailable,
    shown,
)
from model_registry.registry import Registry
from training.contract.errors import RegistryError, RegistryUnavailable, StoreError
from training.contract.system.locks import is_held

pytestmark = pytest.mark.slow

Away = Callable[..., str]
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
FAULT = b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 45\r\n\r\n{"error_code": "INTERNAL_ERROR", "message":1}'


@pytest.fixture
def away() -> Iterator[Away]:
    """Return a function that starts a server and returns its address.

    The server sends the given answers, the last one repeatedly; None lets clients wait.
    """
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
def test_registry_server_error_raises_unavailable_with_advice(away, tmp_path: Path, answer: bytes):
    """MLflow's seven retries with doubling pauses take four minutes; the time in the error is far below."""
    uri = away(answer)
    with pytest.raises(RegistryError, match=r"\[registry-unavailable\]") as raised:
        Registry(uri, tmp_path).find_version("demo", {"a": "b"})
    message = str(raised.value)
    assert uri in message and "versions of demo" in message and "run again" in message
    assert float(re.search(r"in ([0-9.]+) s", message)[1]) < 10


@pytest.mark.parametrize("answer", [UNAVAILABLE, FAULT, b"", None], ids=["503", "500", "hangs up", "silent"])
def test_asking_no_answer_to_a_write_raises_unavailable(away, monkeypatch: pytest.MonkeyPatch, answer: bytes | None):
    """Since MLflow 3.18 the client does not repeat writes, and has other messages for these failures."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    connection = Connection(away(answer))
    with (
        pytest.raises(RegistryUnavailable, match=r"cannot begin: .*[0-9.]+ s \(.+\).*\[registry-unavailable\]"),
        connection.asking("begin") as client,
        without_retries(),
    ):
        client.create_run("0")


def test_asking_unknown_path_is_not_unavailable(away):
    """Such a server is not MLflow's, but its answer is a JSON object too."""
    answer = b'HTTP/1.1 404 Not Found\r\nContent-Length: 23\r\n\r\n{"detail": "Not Found"}'
    connection = Connection(away(answer))
    with (
        pytest.raises(RegistryError, match=r"Not Found.*\[registry-request\]") as raised,
        connection.asking("look") as client,
    ):
        client.search_registered_models()
    assert type(raised.value) is RegistryError


def test_try_request_silent_server_is_asked_once_for_ten_calls(away, monkeypatch: pytest.MonkeyPatch):
    """After a failure of one second, requests fail at once for a second, so later work does not wait again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings: list[str] = []
    requests: list[MlflowClient] = []
    connection = Connection(away(None), warnings.append)

    def ask(client: MlflowClient) -> None:
        requests.append(client)
        client.search_experiments()

    started = time.monotonic()
    assert [connection.try_request("look", ask) for _ in range(10)] == [None] * 10
    assert len(requests) == len(warnings) == 1
    time.sleep(time.monotonic() - started)  # at least as long as the failure took
    assert not connection.try_request("look", ask) and len(requests) == 2


class NoCredentials(Exception):
    """Like botocore's error: not a class known to MLflow."""


def test_asking_error_of_a_cloud_client_raises_registry_error():
    """MLflow passes such errors on when it moves files. Missing keys are not an outage."""
    connection, lost = Connection("http://127.0.0.1:9"), NoCredentials("Unable to locate credentials")
    with (
        pytest.raises(
            RegistryError, match=r"cannot download model: Unable to locate credentials \[registry-request\]$"
        ) as error,
        connection.asking("download model"),
    ):
        raise lost
    assert type(error.value) is RegistryError and error.value.__cause__ is lost


def botocore_error(name: str, base: str, message: str) -> Exception:
    """Return an error like botocore's, which is not installed here."""
    names = {"__module__": "botocore.exceptions"}
    return type(name, (type(base, (Exception,), names),), names)(message)


ENDPOINT = 'Could not connect to the endpoint URL: "http://127.0.0.1:5555/models/1"'


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("EndpointConnectionError", "ConnectionError", ENDPOINT),
        ("ConnectTimeoutError", "ConnectionError", 'Connect timeout on endpoint URL: "http://files/models"'),
        ("ReadTimeoutError", "HTTPClientError", 'Read timeout on endpoint URL: "http://files/models"'),
        ("ConnectionClosedError", "HTTPClientError", "Connection was closed before we received a valid response"),
    ],
)
def test_is_away_object_store_without_answer_is_true(name: str, base: str, message: str):
    error = botocore_error(name, base, message)
    assert is_away(error) and f"({message})" in reason(error, "http://h", 1.0)
    assert not is_away(botocore_error("ClientError", "ClientError", "Access Denied"))


def test_is_away_download_without_answer_is_true():
    """MLflow's summary of failed downloads has only the messages of their errors."""
    heading = "The following failures occurred while downloading one or more artifacts from s3://m:\n##### File a #####"
    assert is_away(MlflowException(f"{heading}\n{ENDPOINT}"))
    assert is_away(
        MlflowException(f"{heading}\nHTTPConnectionPool(host='h', port=80): Max retries exceeded with url: /")
    )
    assert not is_away(MlflowException(f"{heading}\nAn error occurred (404): Not Found"))


def test_is_away_error_while_an_outage_is_handled_is_false(away):
    """The answer to a second question is not an outage, if the first question got no answer."""
    with pytest.raises(ValueError) as raised:
        try:
            with Connection(away(b"")).asking("look") as client, without_retries():
                client.search_registered_models()
        except RegistryUnavailable:
            raise ValueError("no such metric")  # noqa: B904
    assert not is_away(raised.value)


def test_try_request_fast_failure_is_retried_and_warned_once():
    """A wrong request is not an outage. Repeated every second, it is warned of once until it succeeds."""
    warnings: list[str] = []
    requests: list[MlflowClient] = []
    connection = Connection("http://127.0.0.1:9", warnings.append)

    def fail(client: MlflowClient) -> None:
        requests.append(client)
        raise ValueError("no such metric")

    assert not connection.try_request("look", fail)
    time.sleep(0.5)
    assert not connection.try_request("look", fail) and len(requests) == 2
    assert connection.try_request("find", lambda client: "found") == "found"
    assert not connection.try_request("look", fail) and len(warnings) == 1
    assert connection.try_request("look", lambda client: "seen") == "seen"
    assert not connection.try_request("look", fail) and len(warnings) == 2
    assert str(connection.failure) == warnings[1]
    assert "http://127.0.0.1:9 cannot look: no such metric" in warnings[1]


def test_without_retries_overrides_and_restores_the_users_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    with without_retries():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"


def test_without_retries_in_two_threads_restores_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Sensors overlap like this in Dagster's code server, and its runs inherit the environment."""
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


def test_reason_includes_the_cause_after_a_heading():
    """MLflow's message for a failed download has several lines; of SQLAlchemy's, the first is enough."""
    failed = (
        "The following failures occurred while downloading one or more artifacts from s3://m:\n##### File a #####\n404"
    )
    assert reason(ValueError(failed), "http://h", 1.0).endswith(" from s3://m: ##### File a ##### 404")
    assert reason(ValueError("no such table: a\n[SQL: SELECT]\n(Background)"), "http://h", 1.0) == "no such table: a"


def test_shown_and_reason_hide_the_password():
    """Also one with an @, and in messages of the library."""
    uri = "postgresql://me:p@ss@host/runs"
    assert (
        shown(uri) == "postgresql://host/runs"
        and shown("sqlite:////home/a@b/mlflow.db") == "sqlite:////home/a@b/mlflow.db"
    )
    assert shown("postgresql://me:p/w?o#rd@host/runs") == "postgresql://host/runs", "as parsed by SQLAlchemy"
    assert shown("mysql+pymysql://host/runs?user=me&password=secret&charset=x") == (
        "mysql+pymysql://host/runs?user=me&password=...&charset=x"
    )
    assert reason(ValueError(f"cannot open {uri}"), uri, 1.0) == "cannot open postgresql://host/runs"


def test_asking_error_chain_hides_the_password():
    """Dagster stores and shows every cause. Port 9 of loopback refuses at once, and MLflow's message has the address."""
    connection = Connection("http://me:secret@127.0.0.1:9")
    with pytest.raises(RegistryUnavailable) as raised, connection.asking("look for models") as client:
        client.search_registered_models()
    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_page_of_a_database_is_where_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("PEDIGREE_MLFLOW_UI", raising=False)
    assert page(uri, "runs").startswith(f"{DEFAULT_PAGE}/#/runs?")
    note_address(uri, "http://127.0.0.1:41234")
    assert page(uri, "runs").startswith("http://127.0.0.1:41234/#/runs?")
    monkeypatch.setenv("PEDIGREE_MLFLOW_UI", "https://mlflow.example.org/")
    assert page(uri, "runs").startswith("https://mlflow.example.org/#/runs?")
    assert page("http://tracking:5000", "runs").startswith("http://tracking:5000/#/runs?")


def test_connect_keeps_permissions_of_existing_files(tmp_path: Path, migrated_database: Path):
    """The user's folder with MLflow's file may contain private files."""
    private = [tmp_path / name for name in ("mlflow.db", "cookies.db", "deep/secrets.db")]
    (tmp_path / "deep").mkdir()
    shutil.copy(migrated_database, private[0])
    for path in private:
        path.touch()
        path.chmod(0o600)
    connect(f"sqlite:///{private[0]}")
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600] * 3


def test_connect_address_with_options(tmp_path: Path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}?timeout=60"
    assert [experiment.name for experiment in connect(uri).search_experiments()] == ["Default"]
    note_address(uri, "http://127.0.0.1:41234")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock", "served-at.txt"]


def test_connect_replaces_half_made_tables(tmp_path: Path):
    """A process is killed with SIGKILL while MLflow makes its tables, of about 950 kB."""
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
    assert [experiment.name for experiment in connect(uri).search_experiments()] == ["Default"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_connect_opens_a_database_under_a_lock(
    tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
):
    """Opening a database of an older MLflow adds its new tables; one of three concurrent processes failed."""
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    held: list[bool] = []

    def open_client(uri: str, registry_uri: str) -> MlflowClient:
        held.append(is_held(tmp_path / "mlflow.db.lock"))
        return MlflowClient(uri, registry_uri)

    monkeypatch.setattr("model_registry.client.mlflow_api.MlflowClient", open_client, raising=False)
    connect(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert held == [True] and not is_held(tmp_path / "mlflow.db.lock")


def test_is_away_locked_database_is_true(tmp_path: Path):
    """The code is SQLite's."""
    database = tmp_path / "busy.db"
    engine = create_engine(f"sqlite:///{database}", connect_args={"timeout": 0.01})
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OperationalError) as raised, engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE runs (id)")
    assert is_away(raised.value) and is_away(wrapped(raised.value)) and not is_corrupt(raised.value)
    with pytest.raises(OperationalError, match="no such table") as missing, engine.connect() as connection:
        connection.exec_driver_sql("SELECT * FROM runs")
    assert not is_away(wrapped(missing.value))


def test_is_corrupt_damaged_file_is_true(tmp_path: Path):
    """SQLite reports a file that is no database, and one with damaged pages, by different codes."""
    (tmp_path / "none.db").write_bytes(b"not a database" * 1000)
    with closing(sqlite3.connect(tmp_path / "damaged.db")) as database, database:
        database.execute("CREATE TABLE runs (id)")
        database.executemany("INSERT INTO runs VALUES (?)", [(n,) for n in range(10_000)])
    with open(tmp_path / "damaged.db", "r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 65536)
    for name in ("none.db", "damaged.db"):
        with pytest.raises(DBAPIError) as raised, create_engine(f"sqlite:///{tmp_path / name}").connect() as connection:
            connection.exec_driver_sql("SELECT sum(id) FROM runs").all()
        assert is_corrupt(wrapped(raised.value)) and not is_away(raised.value)


def wrapped(error: DBAPIError) -> MlflowException:
    """Return the error as MLflow raises it."""
    try:
        raise MlflowException(error) from error
    except MlflowException as raised:
        return raised


def driver_error(*args: object, invalidated: bool = False, **attributes: str | None) -> MlflowException:
    """Return an error of a driver of Postgres or MySQL, as SQLAlchemy and MLflow pass it on. No driver is installed here."""
    driver = type("OperationalError", (Exception,), attributes)(*args)
    return wrapped(OperationalError("SELECT 1", None, driver, connection_invalidated=invalidated))


@pytest.mark.parametrize(
    "error",
    [
        driver_error('connection to server at "db" failed: Connection refused', pgcode=None),
        driver_error("server closed the connection unexpectedly", pgcode=None, invalidated=True),
        driver_error("the connection is lost", sqlstate=None, invalidated=True),
        driver_error("connection failed: FATAL:  the database system is starting up", sqlstate=None),
        driver_error("connection failed: FATAL:  sorry, too many clients already", pgcode=None),
        driver_error("connection failed: FATAL:  remaining connection slots are reserved for superusers", pgcode=None),
        driver_error("connection timeout expired", sqlstate=None),
        driver_error("failed to resolve host 'db': [Errno -2] Name or service not known", sqlstate=None),
        driver_error("terminating connection due to administrator command", pgcode="57P01"),
        driver_error("canceling statement due to statement timeout", sqlstate="57014"),
        driver_error("canceling statement due to lock timeout", sqlstate="55P03"),
        driver_error("Verklemmung entdeckt", pgcode="40P01"),
        driver_error(2003, "Can't connect to MySQL server on 'db' (timed out)"),
        driver_error(2013, "Lost connection to MySQL server during query"),
        driver_error(1205, "Lock wait timeout exceeded; try restarting transaction"),
    ],
    ids=lambda error: str(error).splitlines()[0],
)
def test_is_away_database_down_or_locked_is_true(error: MlflowException):
    """Codes and messages of Postgres, of MySQL and of their drivers."""
    assert is_away(error)
    assert "run again" in reason(error, "postgresql://db/runs", 1.0)


@pytest.mark.parametrize(
    "error",
    [
        driver_error('connection failed: FATAL:  password authentication failed for user "me"', sqlstate=None),
        driver_error('connection to server at "db" failed: FATAL:  database "runs" does not exist', pgcode=None),
        driver_error("permission denied for table runs", sqlstate="42501"),
        driver_error("cannot execute UPDATE in a read-only transaction", sqlstate="25006"),
        driver_error('relation "timed out" does not exist', sqlstate="42P01"),
        driver_error(1045, "Access denied for user 'me'@'db' (using password: YES)"),
    ],
    ids=lambda error: str(error).splitlines()[0],
)
def test_is_away_database_refusal_is_false(error: MlflowException):
    assert not is_away(error)
    assert reason(error, "postgresql://db/runs", 1.0) == str(error).splitlines()[0]


def test_champion_unreachable_database_is_asked_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """MLflow alone would ask ten times, for 102 seconds, and log each. SQLite stands in for a Postgres driver."""
    registry.register("postgresql.standin", "sqlalchemy.dialects.sqlite.pysqlite", "dialect")
    database = f"postgresql+standin:///{tmp_path / 'nowhere' / 'runs.db'}"
    with pytest.raises(RegistryError, match=r"champion of demo: .*unable to open database file"):
        Registry(database, tmp_path).champion("demo")
    assert not [record for record in caplog.records if record.name == "mlflow.store.db.utils"]


def test_connect_malformed_address_raises():
    with pytest.raises(RegistryError, match=r"'postgresql://db:port/runs'.*'port'.*\[wrong-server-address\]"):
        connect("postgresql://me:secret@db:port/runs")


def test_champion_connection_timeout_raises_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As for a machine without power or behind a firewall: packets get no answer, like from a socket with a full queue."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    message = r"1\.. s \(timed out\);.*\[registry-unavailable\]"
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
        pytest.raises(RegistryUnavailable, match=message),
    ):
        Registry(f"http://127.0.0.1:{full.getsockname()[1]}", tmp_path).champion("demo")


def test_retry_while_unavailable_waits_for_a_restart_only(away, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From its third request on, the server answers like MLflow for an unknown model."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    body = b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such model"}'
    unknown = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    reports: list[str] = []
    back = Registry(away(UNAVAILABLE, UNAVAILABLE, unknown), tmp_path)
    assert retry_while_unavailable(lambda: back.champion("demo"), reports.append) is None
    assert len(reports) == 1 and "60 s" in reports[0] and "MLflow at http" in reports[0]
    down = Registry(away(UNAVAILABLE), tmp_path)
    with pytest.raises(RegistryUnavailable):
        retry_while_unavailable(lambda: down.champion("demo"), reports.append, seconds=0.5)
    with pytest.raises(RegistryError, match=r"demo.*\[wrong-model-address\]"):
        retry_while_unavailable(lambda: down.resolve("demo"), reports.append)
    assert len(reports) == 2, "other errors are raised at once"


def test_try_request_any_error_is_a_warning(tmp_path: Path):
    """For example a full disk when the database is opened: training must not end because of its tracking."""
    warnings: list[str] = []
    connection = Connection(f"sqlite:///{tmp_path / 'none.db'}", warnings.append)

    def fail(client: MlflowClient) -> None:
        raise StoreError("no room in the home")

    assert not connection.try_request("record a step", fail)
    assert len(warnings) == 1 and "no room in the home" in warnings[0]
