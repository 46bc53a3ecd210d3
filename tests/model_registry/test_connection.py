"""A server that is away in each of the ways servers are: real sockets on loopback, and what a person is told."""

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from model_registry.connection import DEFAULT_PAGE, Connection, connect, note_address, page, unrepeated
from model_registry.registry import Registry
from training.contract.errors import RegistryError

Away = Callable[[bytes | None], str]
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def away() -> Iterator[Away]:
    """Makes a server that gives every request the same answer, or lets everybody wait; gives its address."""
    listeners = []

    def start(answer: bytes | None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=_serve, args=(listener, answer), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def _serve(listener: socket.socket, answer: bytes | None) -> None:
    waiting = []
    while True:
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


@pytest.mark.parametrize("answer", [UNAVAILABLE, UNAVAILABLE.replace(b"503", b"500")])
def test_a_registry_that_answers_with_its_failure_is_told_with_what_to_do(away, tmp_path: Path, answer: bytes):
    """MLflow's own patience, seven retries with pauses that double, is four minutes; the test's limit is told in the error."""
    uri = away(answer)
    with pytest.raises(RegistryError) as told:
        Registry(uri, tmp_path).find_version("demo", {"a": "b"})
    message = str(told.value)
    assert message.startswith(f"MLflow at {uri} cannot look for versions of demo: no good answer in ")
    assert "nothing that was computed is lost: run again once it answers" in message
    assert float(re.search(r"in ([0-9.]+) s", message)[1]) < 10


def test_a_server_that_never_answers_is_asked_once_not_ten_times(away, monkeypatch: pytest.MonkeyPatch):
    """A failure of two seconds is believed for two seconds, so the work that follows at once does not wait again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told: list[str] = []
    asked: list[MlflowClient] = []
    connection = Connection(away(None), told.append)

    def ask(client: MlflowClient) -> None:
        asked.append(client)
        client.search_experiments()

    assert [connection.attempt("look", ask) for _ in range(10)] == [False] * 10
    assert len(asked) == len(told) == 1
    time.sleep(2.2)
    assert not connection.attempt("look", ask) and len(asked) == 2


def test_what_fails_at_once_is_tried_again_at_once():
    """A wrong request says nothing of the server."""
    told: list[str] = []
    asked: list[MlflowClient] = []
    connection = Connection("http://127.0.0.1:9", told.append)

    def fail(client: MlflowClient) -> None:
        asked.append(client)
        raise ValueError("no such metric")

    assert not connection.attempt("look", fail)
    time.sleep(0.5)
    assert not connection.attempt("look", fail) and len(asked) == 2


def test_unrepeated_overrules_and_restores_the_patience_of_the_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    with unrepeated():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"


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
