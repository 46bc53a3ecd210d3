"""Wrong use is told in one message that names the place, with the right exit code."""

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

import pytest
import sqlalchemy
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from tests.workflows.homes import ATTRIBUTES, PEDIGREE, ROOT, Home, write_recipe
from workflows.cli.main import main
from workflows.cli.output import explained, reporting


@pytest.fixture(scope="module")
def home(new_home):
    return new_home()


def test_an_unknown_recipe_names_the_known_ones(home):
    done = home.invoke("status", "nowhere")
    assert done.exit_code == 2
    assert "'nowhere'" in done.stderr and "demo" in done.stderr


@pytest.mark.parametrize(("words", "code"), [(["plan", "nowhere"], 2), (["rollback", "nobody"], 2)])
def test_with_json_a_failure_is_json_as_well(home, words, code):
    done = home.invoke(*words, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == code and told.keys() == {"error"}
    assert words[1] in told["error"] and told["error"] in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["status", "demo", "--json", "--variant"], "--variant"),
        (["run", "--json", "demo", "--select", "polcy"], "polcy"),
        (["inspect", "demo", "--row", "-1", "--json"], "-1"),
        (["plan", "--json"], "RECIPE"),
        (["sttus", "demo", "--json"], "sttus"),
        (["--quiet", "status", "demo", "--json"], "--quiet"),
    ],
)
def test_with_json_a_slip_is_json_as_well(home, words, named):
    done = home.invoke(*words)
    told = json.loads(done.stdout)
    assert done.exit_code == 2 and told.keys() == {"error"}
    assert named in told["error"] and told["error"] in done.stderr
    assert home.invoke(*(word for word in words if word != "--json")).stdout == ""


CHECKED = """
import subprocess
from workflows.cli.output import print_json, stdout_for_results
try:
    with stdout_for_results():
        print("a check")
        subprocess.run(["echo", "its process"], check=True)
        raise KeyError
except KeyError:
    print_json({"succeeded": True})
"""


def test_what_checks_and_their_processes_print_is_not_on_stdout():
    done = subprocess.run([sys.executable, "-c", CHECKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (json.loads(done.stdout), set(done.stderr.splitlines())) == ({"succeeded": True}, {"a check", "its process"})


def test_an_interrupt_while_a_connection_is_closed_is_not_logged(home, caplog, monkeypatch):
    """As it was seen: Ctrl-C fell into SQLAlchemy's closing of a connection, and people read a traceback."""
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
def test_a_mistake_in_dagster_s_configuration_is_told_with_its_file(tmp_path, text, mistake):
    """Of a sweep, each recipe has it: one that cannot begin does not take along what the others have to report."""
    home = Home(tmp_path / "home")
    settings = home.path / "dagster" / "dagster.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(text)
    recipe = write_recipe(tmp_path / "sweep", {**ATTRIBUTES, "variants": {"seed": {"training": {"seed": 1}}}})
    for words in (["status", recipe], ["run", recipe, "--variants"]):
        done = home.invoke(*map(str, words), "--json")
        told = json.loads(done.stdout)
        runs = told.get("runs", [told])
        assert done.exit_code == 1 and all(str(settings) in run["error"] and mistake in run["error"] for run in runs)
    assert [(run["recipe"], run["succeeded"]) for run in runs] == [("sweep", False), ("sweep-seed", False)]


def test_an_error_of_a_storage_is_told_in_the_words_of_its_database(tmp_path, monkeypatch, capsys):
    """As of Dagster's storage in Postgres, which tries again for a while; any other error is a mistake of ours."""
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    cause: Exception = OperationalError("SELECT 1", {}, Exception("connection refused\n\tIs the server running?"))

    @reporting
    def command() -> None:
        raise RuntimeError("too many retries") from cause

    with pytest.raises(SystemExit, match="1"):
        command()
    assert "error: a database refuses: connection refused Is the server running?; " in capsys.readouterr().err
    cause = ValueError("ours")
    with pytest.raises(RuntimeError):
        command()


def test_ctrl_c_ends_the_imports_without_a_word():
    """They take seconds; the library that is mapped when the signal is sent is one of the first."""
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
def test_on_another_system_the_first_word_is_where_it_runs(system):
    source = f"import sys, pedigree; sys.platform = {system!r}; sys.argv = ['pedigree', 'run', 'demo']; pedigree.main()"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Pedigree runs on Linux") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_place_of_a_stream_that_is_closed(tmp_path, closed):
    """It would have the lowest number that is free."""
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


def test_what_a_terminal_has_no_letter_for_is_escaped():
    """By Python's rules for stderr; in JSON by its own, so that a program reads what was written."""
    encodings = ["ascii", "latin-1", "utf-8"]
    source = (
        "import pedigree, sys; from workflows.cli.output import print_json\n"
        "for encoding in sys.argv[1:]:\n"
        "    sys.stdout.reconfigure(encoding=encoding, errors='strict'); pedigree.open_standard_streams()\n"
        "    print('é漢'); print_json({'a': 'é漢😀'})"
    )
    command = [sys.executable, "-c", source, *encodings]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.splitlines()
    for encoding, text, told in zip(encodings, lines[::2], lines[1::2], strict=True):
        assert json.loads(told.decode(encoding)) == {"a": "é漢😀"}
        assert text == "é漢".encode(encoding, "backslashreplace")


def test_an_unknown_asset_is_wrong_use(home):
    done = home.invoke("run", "demo", "--select", "polcy")
    assert done.exit_code == 2
    assert "polcy" in done.stderr and "policy" in done.stderr


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


@pytest.mark.parametrize("words", [["status", "--help"], ["run", "nowhere"], ["plan"]])
def test_a_question_or_a_slip_makes_no_home(tmp_path, words):
    Home(tmp_path / "home").invoke(*words)
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_is_named_with_what_to_do(tmp_path):
    (tmp_path / "home").write_text("a file where a folder should be")
    done = Home(tmp_path / "home").invoke("status", "demo")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert f"{tmp_path / 'home'} cannot be used" in done.stderr and "set PEDIGREE_HOME" in done.stderr


def test_a_path_that_is_not_text_is_refused_with_its_bytes(home, tmp_path):
    """A name in Latin-1, say, which no JSON can hold."""
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/w\xe4chentlich"))
    recipe = write_recipe(tmp_path / "recipe", {**ATTRIBUTES, "data": {"sources": [{"path": "*.jsonl"}]}})
    (recipe / f"{latin.name}.jsonl").touch()
    write_recipe(latin, ATTRIBUTES)
    for used, folder, place in ((home, latin, tmp_path), (Home(latin), recipe, tmp_path), (home, recipe, recipe)):
        done = used.invoke("plan", str(folder), "--json")
        assert done.exit_code == 2
        told = json.loads(done.stdout)["error"]
        assert re.search(rf"{place}/w\\xe4chentlich(\.jsonl)? has bytes that are not utf-8; rename it", told)


@pytest.mark.parametrize("name", ["what?", "h%203"])
@pytest.mark.parametrize("variable", ["PEDIGREE_HOME", "DAGSTER_HOME"])
def test_a_home_whose_databases_would_lie_elsewhere_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, name, variable
):
    (other := tmp_path / "other").mkdir()
    for each in ("PEDIGREE_HOME", "DAGSTER_HOME"):
        monkeypatch.setenv(each, str(tmp_path / name if each == variable else other))
    done = CliRunner().invoke(main, ["gc", "--json"])
    assert done.exit_code == 2 and json.loads(done.stdout)["error"].startswith(
        f"{variable} is {tmp_path / name}; a `?`"
    )
    assert list(tmp_path.iterdir()) == [other] and list(other.iterdir()) == []


@pytest.mark.parametrize("words", ["unable to open database file", "file is not a database"])
def test_a_database_that_is_none_is_told_without_a_traceback(tmp_path, words):
    database = tmp_path / "dagster" / "history" / "runs.db"
    if words.startswith("unable"):
        database.mkdir(parents=True)
    else:
        database.parent.mkdir(parents=True)
        database.write_bytes(b"no database" * 1000)
    done = Home(tmp_path).invoke("gc")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert f"a database refuses: {words}; PEDIGREE_HOME is" in done.stderr


def test_what_belongs_to_another_user_is_told_with_its_path_and_what_to_do(tmp_path, monkeypatch):
    """SQLite does not say which file; and the same command would not go on from there. Played, since root may write all."""
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    files = [tmp_path / "mlflow" / "mlflow.db", tmp_path / "dagster" / "history" / "runs" / "4f2a.db-wal"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(os, "access", lambda path, _: path != files[1])
    refusal = OperationalError(None, None, sqlite3.OperationalError("attempt to write a readonly database"))
    for error in (refusal, PermissionError(errno.EACCES, "Permission denied", str(files[1]))):
        told = explained(error)
        assert str(files[1]) in told and "umask 002" in told and "the same command" not in told


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_port_that_is_none_is_wrong_use(home, port):
    assert home.invoke("ui", "--port", port).exit_code == 2


@pytest.mark.slow
def test_missing_data_fails_with_the_path(home, tmp_path):
    folder = write_recipe(tmp_path / "no-data", ATTRIBUTES)
    done = home.invoke("run", str(folder), "--select", "raw_preferences")
    assert done.exit_code == 1
    said = done.stdout.replace("\n", "")
    assert str(folder / "preferences.jsonl") in said and "training.contract" not in said


def test_a_reader_that_has_seen_enough_is_no_failure_to_tell_of(home):
    """As in `pedigree gc --json | head -c 1`: the pipe is closed on its other side."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**home.environment, "PYTHONUNBUFFERED": "1"}
    command = [PEDIGREE, "gc", "--json"]
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
