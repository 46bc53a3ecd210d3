"""A home that several processes and several users use at once."""

import multiprocessing
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from assets.execution.run_liveness import is_alive, this_process
from model_registry.client.relocate import relocate_artifacts
from model_registry.connection import connect
from tests.workflows.homes import check_error
from workflows.orchestration.resources import build_services, dagster_instance, prepare_home

pytestmark = pytest.mark.slow


def at_once(count: int, work) -> list[int | None]:
    """Start `count` processes that begin `work` at the same moment. Return their exit codes."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(count)

    def begin() -> None:
        gate.wait()
        work()

    processes = [context.Process(target=begin) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@pytest.fixture
def group_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("group_umask")
def test_first_commands_of_a_home_may_run_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise Dagster's tables are created several times, its database has two versions, and nothing can open it."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    prepare_home(tmp_path)

    def open_it() -> None:
        with dagster_instance():
            pass

    assert at_once(4, open_it) == [0] * 4
    open_it()
    databases = list((tmp_path / "dagster").rglob("*.db"))
    assert len(databases) >= 3 and all(path.stat().st_mode & 0o020 for path in databases), (
        "its group may write them too"
    )


@pytest.mark.parametrize("value", ["dagster's", "~/dagster's"])
def test_dagster_home_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str):
    """A path counts from the current folder, or with `~` from the user's own, as for Dagster."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("HOME", str(tmp_path)), ("PEDIGREE_HOME", str(tmp_path / "home")), ("DAGSTER_HOME", value)):
        monkeypatch.setenv(name, text)
    with dagster_instance() as instance:
        assert Path(instance.root_directory) == tmp_path / "dagster's"
    assert {path.name for path in tmp_path.iterdir()} == {"home", "dagster's"}


def test_dagster_settings_are_written_atomically(tmp_path: Path):
    """Another command may begin just then, or the disk may refuse to write more than ten bytes."""
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    script += "import workflows.orchestration.resources as r\n"
    script += "from pathlib import Path; r.prepare_home(Path(sys.argv[1]))"
    environment = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
    command = [sys.executable, "-B", "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    check_error(done.stderr, "unusable-home")
    assert list((tmp_path / "dagster").iterdir()) == []


def test_artifacts_follow_a_home_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: the places of run, version and next run in MLflow."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    about: dict[str, Any] = {"experiment": "demo", "params": {}, "tags": {}}
    first = build_services(tmp_path / "alt 100% ü")
    with first.tracker.run(key="a", name="a", **about) as run:
        pass
    client = connect(first.tracker.tracking_uri)
    client.create_registered_model("demo")
    client.create_model_version("demo", f"{client.get_run(run.run_id).info.artifact_uri}/policy", run.run_id)
    (tmp_path / "alt 100% ü").rename(tmp_path / "new")
    moved = build_services(tmp_path / "new")
    client = connect(moved.tracker.tracking_uri)
    below = f"{(tmp_path / 'new' / 'mlflow' / 'artifacts' / 'demo').as_uri()}/"
    assert client.get_run(run.run_id).info.artifact_uri == f"{below}{run.run_id}/artifacts"
    assert client.get_model_version("demo", "1").source == f"{below}{run.run_id}/artifacts/policy"
    with moved.tracker.run(key="b", name="b", **about) as another:
        pass
    assert client.get_run(another.run_id).info.artifact_uri == f"{below}{another.run_id}/artifacts"
    (tmp_path / "link").symlink_to("new")
    build_services(tmp_path / "link")
    assert client.get_run(run.run_id).info.artifact_uri.startswith(below), (
        "another path to the same folder is not a move"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("group_umask")
def test_first_runs_of_a_database_may_be_concurrent(tmp_path: Path):
    assert at_once(2, lambda: connect(f"sqlite:///{tmp_path}/mlflow/mlflow.db")) == [0, 0]
    assert (tmp_path / "mlflow" / "mlflow.db").stat().st_mode & 0o020, "its group may write it too"


TABLES = """
CREATE TABLE experiments (artifact_location TEXT);
CREATE TABLE runs (artifact_uri TEXT);
CREATE TABLE model_versions (source TEXT, storage_location TEXT);
"""


def test_addresses_in_a_database_of_the_users_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    database, place = tmp_path / "own.db", (tmp_path / "gone" / "mlflow" / "artifacts" / "demo").as_uri()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(TABLES)
        connection.execute("INSERT INTO experiments VALUES (?)", (place,))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    build_services(tmp_path / "home")
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT artifact_location FROM experiments").fetchall() == [(place,)]


def test_logged_models_move_with_the_home(tmp_path: Path) -> None:
    """Databases of MLflow 2 lack their table, as in the test below."""
    root, old = (
        tmp_path / "new" / "mlflow" / "artifacts",
        (tmp_path / "old" / "mlflow" / "artifacts" / "moved").as_uri(),
    )
    (root / "moved").mkdir(parents=True)
    database = tmp_path / "new" / "mlflow" / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(f"{TABLES} CREATE TABLE logged_models (artifact_location TEXT);")
        connection.execute("INSERT INTO experiments VALUES (?)", (old,))
        connection.execute("INSERT INTO logged_models VALUES (?)", (f"{old}/models/m-1/artifacts",))
    relocate_artifacts(database, root)
    with closing(sqlite3.connect(database)) as connection:
        [(found,)] = connection.execute("SELECT artifact_location FROM logged_models")
    assert found == f"{(root / 'moved').as_uri()}/models/m-1/artifacts"


def test_only_artifacts_below_the_home_are_relocated(tmp_path: Path):
    """The home moved from `old` to `new`. Files elsewhere stay, in any folder."""
    root, elsewhere = tmp_path / "new" / "mlflow" / "artifacts", tmp_path / "big disk" / "mlflow" / "artifacts"
    (root / "moved").mkdir(parents=True)
    (elsewhere / "kept").mkdir(parents=True)
    (tmp_path / "link").symlink_to("new")
    old = tmp_path / "old" / "mlflow" / "artifacts"
    for name in ("moved", "moved too", "moved-not"):  # the original of a copy still exists
        (old / name).mkdir(parents=True)
    (root / "moved too").mkdir()
    places = {
        (old / "moved").as_uri(): (root / "moved").as_uri(),
        (old / "nothing yet").as_uri(): (root / "nothing yet").as_uri(),
        (elsewhere / "kept").as_uri(): (elsewhere / "kept").as_uri(),
        (tmp_path / "link" / "mlflow" / "artifacts" / "moved").as_uri(): None,
        (old / "moved too").as_uri(): (root / "moved too").as_uri(),
        (old / "moved").as_uri() + "-not": None,
        "s3://bucket/mlflow/artifacts/moved": None,
    }
    database = tmp_path / "new" / "mlflow" / "mlflow.db"
    with sqlite3.connect(database) as connection:
        connection.executescript(TABLES)
        connection.executemany("INSERT INTO experiments VALUES (?)", [(place,) for place in places])
        connection.execute("INSERT INTO experiments VALUES (NULL)")
        connection.executemany("INSERT INTO runs VALUES (?)", [(f"{place}/1/artifacts",) for place in places])
        rows = [(f"{place}/1/artifacts/policy", f"{place}/2/artifacts/policy") for place in places]
        connection.executemany("INSERT INTO model_versions VALUES (?, ?)", rows)
    connection.close()
    relocate_artifacts(database, root)
    with sqlite3.connect(database) as connection:
        experiments = [found for (found,) in connection.execute("SELECT artifact_location FROM experiments")]
        runs = [found for (found,) in connection.execute("SELECT artifact_uri FROM runs")]
        versions = connection.execute("SELECT source, storage_location FROM model_versions").fetchall()
    connection.close()
    assert experiments == [*(now or place for place, now in places.items()), None]
    assert runs == [f"{now or place}/1/artifacts" for place, now in places.items()]
    assert versions == [
        (f"{now or place}/1/artifacts/policy", f"{now or place}/2/artifacts/policy") for place, now in places.items()
    ]


SIGN_AND_WAIT = """
import sys
from pathlib import Path
from assets.execution.run_liveness import this_process
print(this_process(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that works in a home and has recorded its identity."""
    command = [sys.executable, "-c", SIGN_AND_WAIT, str(tmp_path / "my home")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_process_is_alive_until_it_is_killed(tmp_path: Path, worker):
    home, identity = tmp_path / "my home", worker.stdout.readline().rstrip()
    assert is_alive(identity, home) and is_alive(this_process(home), home)
    assert identity.startswith(f"{platform.node()} {worker.pid} "), "human-readable"
    worker.kill()
    worker.wait()
    assert not is_alive(identity, home)
    assert is_alive(this_process(home), home)


def test_liveness_does_not_depend_on_host_names_and_process_ids(tmp_path: Path, worker):
    """From a container: the same host name, and process ids that are unused or belong to another process."""
    lock = worker.stdout.readline().rstrip().split(" ", 2)[2]
    for who in (f"{platform.node()} 999999999 {lock}", f"{platform.node()} 1 {lock}", f"elsewhere 1 {lock}"):
        assert is_alive(who, tmp_path / "my home")
    worker.kill()
    worker.wait()
    assert not is_alive(f"elsewhere 1 {lock}", tmp_path / "my home"), "not of the reader's machine"


def test_process_of_a_moved_home_is_alive_until_it_ends(tmp_path: Path, worker):
    identity = worker.stdout.readline().rstrip()
    shutil.copytree(tmp_path / "my home", tmp_path / "copy")
    assert is_alive(identity, tmp_path / "copy"), "the original exists, and so does its worker"
    (tmp_path / "my home").rename(tmp_path / "moved")
    assert is_alive(identity, tmp_path / "moved"), "its lock moved with the home"
    worker.kill()
    worker.wait()
    assert not is_alive(identity, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    assert not is_alive(identity, tmp_path / "copy")
