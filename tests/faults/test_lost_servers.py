"""MLflow's server, and the command itself, killed amid the release; databases that are damaged, locked or gone."""

import itertools
import re
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.disturbed import CommandHost, Undisturbed, check_fingerprints, check_next_run, wait_until
from tests.model_registry.conftest import Server, migrated_database  # noqa: F401
from tests.workflows.homes import Home

pytestmark = pytest.mark.long

# Requests of a release, in their order: the metrics, the model, its version, its aliases.
POINTS = [
    ("log_batch", "after"),
    ("create_registered_model", "after"),
    ("create_model_version", "before"),
    ("create_model_version", "after"),
    ("set_registered_model_alias", "before"),
    ("set_registered_model_alias", "after"),
]


def versions_in(database: Path) -> list[tuple[int, str]]:
    """Return the number and state of all versions, by SQL."""
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.execute("SELECT version, status FROM model_versions"))


def aliases_in(database: Path) -> set[tuple[str, int]]:
    with closing(sqlite3.connect(database)) as connection:
        return set(connection.execute("SELECT alias, version FROM registered_model_aliases"))


def check_released_once(database: Path) -> None:
    assert versions_in(database) == [(1, "READY")]
    assert aliases_in(database) == {("candidate", 1), ("champion", 1)}


@pytest.mark.parametrize(("request_", "at"), POINTS)
def test_killed_release_is_finished_by_the_next_run(
    request_: str, at: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    home = undisturbed.without("released_model", tmp_path / "home")
    fault = {"at": at, "reached": str(tmp_path / "reached"), "do": "kill -9 $PPID"}
    command = host.start(home, "run", str(undisturbed.recipe), fault=fault, around=request_)
    seconds = command.seconds_until_nothing_is_left()
    assert command.wait() == -signal.SIGKILL and (tmp_path / "reached").exists()
    check_next_run(host, home, undisturbed)
    check_released_once(home.path / "mlflow/mlflow.db")
    record("released_model", f"SIGKILL of pedigree {at} `{request_}`", "one version, champion", seconds, same=True)


@pytest.fixture
def server(tmp_path: Path, migrated_database: Path) -> Iterator[Server]:  # noqa: F811
    (folder := tmp_path / "server").mkdir()
    started = Server(folder, migrated_database)
    started.start()
    yield started
    started.kill()


@pytest.mark.parametrize(("request_", "at"), POINTS)
def test_release_outlasts_a_restart_of_the_server(
    request_: str,
    at: str,
    undisturbed: Undisturbed,
    host: CommandHost,
    server: Server,
    tmp_path: Path,
    record: Callable[..., None],
) -> None:
    home, reached = undisturbed.without("released_model", tmp_path / "home"), tmp_path / "reached"
    environment = {"MLFLOW_TRACKING_URI": server.uri}
    assert server._process is not None
    fault = {"at": at, "reached": str(reached), "do": f"kill -9 -{server._process.pid}"}
    command = host.start(
        home, "run", str(undisturbed.recipe), "--json", fault=fault, around=request_, environment=environment
    )
    wait_until(reached.exists, request_)
    server.kill()
    server.start()
    status, text = command.wait(), command.output
    assert status == 0, text
    check_fingerprints(text, undisturbed)
    check_released_once(tmp_path / "server/mlflow.db")
    seconds = command.seconds_until_nothing_is_left()
    fault_ = f"SIGKILL of MLflow's server {at} `{request_}`, then a restart"
    record("released_model", fault_, "waits; one version, champion", seconds, same=True)


def test_release_without_a_server_fails_in_a_minute_and_is_finished_later(
    undisturbed: Undisturbed, host: CommandHost, server: Server, tmp_path: Path, record: Callable[..., None]
) -> None:
    home = undisturbed.without("released_model", tmp_path / "home")
    environment = {"MLFLOW_TRACKING_URI": server.uri}
    server.kill()
    command = host.start(home, "run", str(undisturbed.recipe), environment=environment)
    status, text = command.wait(), command.output
    assert status == 1 and server.uri in text and "[registry-unavailable]" in text, text
    seconds = command.seconds_until_nothing_is_left()
    server.start()
    again = host.start(home, "run", str(undisturbed.recipe), "--json", environment=environment)
    assert again.wait() == 0
    check_fingerprints(again.output, undisturbed)
    check_released_once(tmp_path / "server/mlflow.db")
    fault = "MLflow's server is down; up for the next run"
    record("released_model", fault, "`[registry-unavailable]` after a minute", seconds, same=True)


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def remove(path: Path) -> None:
    path.unlink()


# The database below the home, what happens to it, and the code of the message, or nothing if the run does not need it.
DATABASES = {
    "runs": "dagster/history/runs.db",
    "index": "dagster/history/runs/index.db",
    "schedules": "dagster/schedules/schedules.db",
    "mlflow": "mlflow/mlflow.db",
}
DAMAGED = {"is garbage": garbage, "is deleted": remove}


@pytest.mark.parametrize(("name", "damage"), list(itertools.product(DATABASES, DAMAGED)))
def test_damaged_database_is_named_and_can_be_moved_away(
    name: str, damage: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    """Only a registry that is gone leads to a new version; all else is found in the store."""
    path = (home := Home(tmp_path / "home")).path / DATABASES[name]
    shutil.copytree(undisturbed.home.path, home.path)
    DAMAGED[damage](path)
    command = host.start(home, "run", str(undisturbed.recipe))
    status, text = command.wait(), " ".join(command.output.split())
    if damage == "is garbage" and status == 1:
        assert str(path) in text and re.search("move it away", text), text
        assert re.search(r"\[(database-corrupt|registry-request)\]", text), text
        path.unlink()
        outcome = "named, with the remedy: move it away"
    else:
        assert status == 0, text
        outcome = "nothing is lost"
    check_next_run(host, home, undisturbed)
    record("home", f"`{DATABASES[name]}` {damage}", outcome, command.seconds_until_nothing_is_left(), same=True)


@pytest.mark.parametrize("name", ["runs", "index"])
def test_locked_database_is_named(
    name: str, undisturbed: Undisturbed, host: CommandHost, tmp_path: Path, record: Callable[..., None]
) -> None:
    home = Home(tmp_path / "home")
    shutil.copytree(undisturbed.home.path, home.path)
    path = home.path / DATABASES[name]
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        command = host.start(home, "run", str(undisturbed.recipe))
        status, text = command.wait(), " ".join(command.output.split())
        assert status == 1 and str(path) in text and "[database-locked]" in text, text
        holder.execute("ROLLBACK")
    check_next_run(host, home, undisturbed)
    seconds = command.seconds_until_nothing_is_left()
    record("home", f"`{DATABASES[name]}` is locked", "`[database-locked]`", seconds, same=True)
