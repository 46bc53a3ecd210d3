"""Wrong use gives one message that names the place, and the right exit code."""

import contextlib
import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import sqlalchemy
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from tests.workflows.homes import ATTRIBUTES, PEDIGREE, ROOT, Home, check_error, check_values, write_recipe
from workflows.cli.main import COMMANDS, main
from workflows.cli.output import explained, reporting


@pytest.fixture(scope="module")
def home(new_home):
    return new_home()


def test_an_unknown_recipe_names_the_known_ones(home):
    done = home.invoke("status", "nowhere")
    assert done.exit_code == 2
    check_error(done.stderr, "unknown-recipe", "'nowhere'", "demo")


@pytest.mark.parametrize(
    ("command", "name", "code"), [("plan", "nowhere", "unknown-recipe"), ("rollback", "nobody", "unknown-model")]
)
def test_failure_with_json_is_json(home, command, name, code):
    done = home.invoke(command, name, "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 2 and answer.keys() == {"error"}
    check_error(answer["error"], code, name)
    assert answer["error"] in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["status", "demo", "--json", "--variant"], "--variant"),
        (["run", "--json", "demo", "--select", "polcy"], "polcy"),
        (["inspect", "demo", "--row", "-1", "--json"], "-1"),
        (["plan", "--json"], "RECIPE"),
        (["sttus", "demo", "--json"], "sttus"),
        (["--quiet", "status", "demo", "--json"], "--quiet"),
    ],
)
def test_usage_error_with_json_is_json(home, arguments, named):
    done = home.invoke(*arguments)
    answer = json.loads(done.stdout)
    assert done.exit_code == 2 and answer.keys() == {"error"}
    assert named in answer["error"] and answer["error"] in done.stderr
    assert home.invoke(*(argument for argument in arguments if argument != "--json")).stdout == ""


CHECKED = """
import subprocess
from workflows.cli.group import print_json
from workflows.cli.output import stdout_for_results
try:
    with stdout_for_results():
        print("a check")
        subprocess.run(["echo", "its process"], check=True)
        raise KeyError
except KeyError:
    print_json({"succeeded": True})
"""


def test_prints_of_checks_and_their_processes_are_not_on_stdout():
    done = subprocess.run([sys.executable, "-c", CHECKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (json.loads(done.stdout), set(done.stderr.splitlines())) == ({"succeeded": True}, {"a check", "its process"})


def test_an_interrupt_while_a_connection_is_closed_is_not_logged(home, caplog, monkeypatch):
    """Ctrl-C once fell into SQLAlchemy's closing of a connection, and a traceback was logged."""
    home.invoke("status", "nowhere")
    engine = sqlalchemy.create_engine("sqlite://", poolclass=sqlalchemy.pool.NullPool)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.dialect, "do_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.connect().close()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("concurency: {}", "concurency"),
        ("telemetry: {enabled: false", "line 1"),
        ("run_storage: {module: nowhere_postgres, class: Storage}", "nowhere_postgres"),
    ],
)
def test_invalid_dagster_configuration_is_reported_with_its_file(tmp_path, text, mistake):
    """In a sweep every recipe meets it: one that cannot begin must not stop the report of the others."""
    home = Home(tmp_path / "home")
    settings = home.path / "dagster" / "dagster.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(text)
    recipe = write_recipe(tmp_path / "sweep", {**ATTRIBUTES, "variants": {"seed": {"training": {"seed": 1}}}})
    for arguments in (["status", recipe], ["run", recipe, "--variants"]):
        done = home.invoke(*map(str, arguments), "--json")
        answer = json.loads(done.stdout)
        runs = answer.get("runs", [answer])
        assert done.exit_code == 1 and all(str(settings) in run["error"] and mistake in run["error"] for run in runs)
    assert [(run["recipe"], run["succeeded"]) for run in runs] == [("sweep", False), ("sweep-seed", False)]


def test_error_of_a_storage_has_the_databases_message(tmp_path, monkeypatch, capsys):
    """Dagster's storage in Postgres tries again for a while. Any other error is a mistake of ours."""
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    cause: Exception = OperationalError("SELECT 1", {}, Exception("connection refused\n\tIs the server running?"))

    @reporting
    def command() -> None:
        raise RuntimeError("too many retries") from cause

    with pytest.raises(SystemExit, match="1"):
        command()
    assert " connection refused Is the server running?; " in capsys.readouterr().err
    cause = ValueError("ours")
    with pytest.raises(RuntimeError):
        command()


def test_ctrl_c_during_imports_prints_nothing():
    """Imports take seconds. The signal comes when one of the first libraries was just mapped."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pedigree", "status", "nowhere"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while "_pydantic_core" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"") and process.returncode == -signal.SIGINT


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_on_another_system_the_message_names_the_supported_one(system):
    source = f"import sys, pedigree; sys.platform = {system!r}; sys.argv = ['pedigree', 'run', 'demo']; pedigree.main()"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and "Linux" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_stream_is_not_replaced_by_a_file(tmp_path, closed):
    """It would get the lowest free number."""
    script = (
        "import os, pedigree, sys; pedigree.open_standard_streams(); file = open(sys.argv[1], 'w'); "
        "print('out'), print('err', file=sys.stderr), sys.stdin.read(); print(file.fileno(), file=file); "
        "print(*(os.get_inheritable(n) for n in range(3)), file=file)"
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "-", sys.executable, "-c", script, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "3\nTrue True True\n"
    assert (done.stdout, done.stderr) == ("" if ">&- 2" in closed else "out\n", "" if "2" in closed else "err\n")


def test_characters_missing_in_the_encoding_are_escaped():
    """By Python's rules for stderr. JSON has its own rules, so that a program reads the original."""
    encodings = ["ascii", "latin-1", "utf-8"]
    source = (
        "import pedigree, sys; from workflows.cli.group import print_json\n"
        "for encoding in sys.argv[1:]:\n"
        "    sys.stdout.reconfigure(encoding=encoding, errors='strict'); pedigree.open_standard_streams()\n"
        "    print('é漢'); print_json({'a': 'é漢😀'})"
    )
    command = [sys.executable, "-c", source, *encodings]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.splitlines()
    for encoding, text, answer in zip(encodings, lines[::2], lines[1::2], strict=True):
        assert json.loads(answer.decode(encoding)) == {"a": "é漢😀"}
        assert text == "é漢".encode(encoding, "backslashreplace")


def test_an_unknown_asset_is_wrong_use(home):
    done = home.invoke("run", "demo", "--select", "polcy")
    assert done.exit_code == 2
    assert "Did you mean 'policy'? 'polcy' is not one of" in done.stderr


def test_a_wrong_field_is_named_with_file_and_line(home, tmp_path):
    attributes = {**ATTRIBUTES, "training": {"optimizer": {"learning_rate": "fast"}, "batchsize": 3}}
    folder = write_recipe(tmp_path / "wrong", attributes)
    lines = (folder / "defs.yaml").read_text().splitlines()
    done = home.invoke("run", str(folder))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    message = done.stderr.replace("\n", "")
    for field, value in (("learning_rate", "fast"), ("batchsize", "3")):
        [number] = [n for n, line in enumerate(lines, 1) if line.strip().startswith(f"{field}: {value}")]
        assert field in message and f"defs.yaml:{number}" in message


@pytest.mark.parametrize("arguments", [["status", "--help"], ["run", "nowhere"], ["plan"]])
def test_help_and_usage_errors_create_no_home(tmp_path, arguments):
    Home(tmp_path / "home").invoke(*arguments)
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_is_named_with_what_to_do(tmp_path):
    (tmp_path / "home").write_text("a file where a folder should be")
    done = Home(tmp_path / "home").invoke("status", "demo")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    check_error(done.stderr, "unusable-home", tmp_path / "home", "PEDIGREE_HOME")


def test_undecodable_path_is_refused_with_its_bytes(home, tmp_path):
    """A name in Latin-1 cannot be in JSON."""
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/w\xe4chentlich"))
    recipe = write_recipe(tmp_path / "recipe", {**ATTRIBUTES, "data": {"sources": [{"path": "*.jsonl"}]}})
    (recipe / f"{latin.name}.jsonl").touch()
    write_recipe(latin, ATTRIBUTES)
    for used, folder, place in ((home, latin, tmp_path), (Home(latin), recipe, tmp_path), (home, recipe, recipe)):
        done = used.invoke("plan", str(folder), "--json")
        assert done.exit_code == 2
        message = json.loads(done.stdout)["error"]
        assert re.search(rf"{place}/w\\xe4chentlich(\.jsonl)? .*utf-8.*\[undecodable-path\]", message), message


@pytest.mark.parametrize("name", ["what?", "h%203"])
@pytest.mark.parametrize("variable", ["PEDIGREE_HOME", "DAGSTER_HOME"])
def test_home_with_unsupported_characters_is_refused_before_anything_is_created(tmp_path, monkeypatch, name, variable):
    (other := tmp_path / "other").mkdir()
    for each in ("PEDIGREE_HOME", "DAGSTER_HOME"):
        monkeypatch.setenv(each, str(tmp_path / name if each == variable else other))
    done = CliRunner().invoke(main, ["gc", "--json"])
    assert done.exit_code == 2
    check_error(json.loads(done.stdout)["error"], "unsupported-path", f"{variable} is {tmp_path / name}", "`?`")
    assert list(tmp_path.iterdir()) == [other] and list(other.iterdir()) == []


@pytest.mark.parametrize("cause", ["unable to open database file", "file is not a database"])
def test_invalid_database_is_reported_without_a_traceback(tmp_path, cause):
    database = tmp_path / "dagster" / "history" / "runs.db"
    if cause.startswith("unable"):
        database.mkdir(parents=True)
    else:
        database.parent.mkdir(parents=True)
        database.write_bytes(b"no database" * 1000)
    done = Home(tmp_path).invoke("gc")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    check_values(done.stderr, cause, f"{database} is corrupt", "move it away", "the same command")


def test_a_locked_database_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    paths = [tmp_path / "dagster" / "history" / "runs" / name for name in ("index.db", "other.db")]
    paths[0].parent.mkdir(parents=True)
    for path in paths:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE t (a)")
    refusal = OperationalError(None, None, sqlite3.OperationalError("database is locked"))
    assert "PEDIGREE_HOME" in explained(refusal), "nothing is locked any more"
    with contextlib.closing(sqlite3.connect(paths[1], isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        check_values(explained(refusal), f"{paths[1]} is in use by another process")


def test_file_of_another_user_is_reported_with_path_and_remedy(tmp_path, monkeypatch):
    """SQLite does not name the file, and the same command would fail again. Simulated, because root may write every file."""
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    files = [tmp_path / "mlflow" / "mlflow.db", tmp_path / "dagster" / "history" / "runs" / "4f2a.db-wal"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(os, "access", lambda path, _: path != files[1])
    refusal = OperationalError(None, None, sqlite3.OperationalError("attempt to write a readonly database"))
    for error in (refusal, PermissionError(errno.EACCES, "Permission denied", str(files[1]))):
        message = explained(error)
        check_values(message, files[1], "umask 002")
        assert "the same command" not in message


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_invalid_port_is_wrong_use(home, port):
    assert home.invoke("ui", "--port", port).exit_code == 2


@pytest.mark.slow
def test_missing_data_fails_with_the_path(home, tmp_path):
    folder = write_recipe(tmp_path / "no-data", ATTRIBUTES)
    done = home.invoke("run", str(folder), "--select", "raw_preferences")
    assert done.exit_code == 1
    output = done.stdout.replace("\n", "")
    assert str(folder / "preferences.jsonl") in output and "training.contract" not in output


def test_closed_pipe_prints_no_error(home):
    """As in `pedigree gc --json | head -c 1`: the reader has closed the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**home.environment, "PYTHONUNBUFFERED": "1"}
    command = [PEDIGREE, "gc", "--json"]
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_has_the_first_sentence_of_each_command_without_its_imports():
    """Dagster, MLflow and pyarrow take seconds, and the help needs none of them."""
    context = click.Context(main)
    assert {name: main.get_command(context, name).get_short_help_str(1000) for name in COMMANDS} == {
        name: lazy.help for name, lazy in COMMANDS.items()
    }
    program = (
        "import sys; from click.testing import CliRunner; from workflows.cli.main import main\n"
        "output = CliRunner().invoke(main, ['--help']).output\n"
        "assert 'rollback' in output, output\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'dagster', 'mlflow', 'pyarrow', 'sqlalchemy', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
