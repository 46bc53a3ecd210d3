"""An interrupted run leaves no process behind, and the next run resumes it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import dagster as dg
import psutil
import pytest

from tests.workflows.commands.test_run import steps_of
from tests.workflows.homes import ATTRIBUTES, PEDIGREE, check_values, copy_without_policy, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.system]
SECONDS_TO_END = 60.0  # twice the grace period for saving a checkpoint, which a slow disk may need
LONG = {
    **ATTRIBUTES,
    "training": {**ATTRIBUTES["training"], "max_steps": 4000},
    "compute": {**ATTRIBUTES["compute"], "parallel": "fsdp"},
}


@pytest.fixture
def long_recipe(tmp_path, small_recipe):
    folder = write_recipe(tmp_path / "small", LONG)
    for name in ("preferences.jsonl", "base"):
        (folder / name).symlink_to(small_recipe / name)
    return folder


@pytest.fixture
def without_policy(first_run, tmp_path):
    """Return a copy of the home in which everything was made, without the policy."""
    return copy_without_policy(first_run[0], tmp_path / "home")


def processes_of(home: Path) -> list[psutil.Process]:
    """Return every process of this home, anywhere in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PEDIGREE_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def until_steps(home: Path, count: int) -> Path:
    """Wait until the policy's job has taken `count` steps; return its events."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for events in home.glob("jobs/policy-*/events.jsonl"):
            if sum('"event": "step"' in line for line in events.read_text().splitlines()) >= count:
                return events
        time.sleep(0.2)
    raise AssertionError(f"no {count} steps in {list(home.glob('jobs/*/*'))}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_no_process_survives_the_parent(long_recipe, without_policy, tmp_path, number):
    home, output, log = without_policy, tmp_path / "stdout", tmp_path / "stderr"
    with open(output, "wb") as stdout, open(log, "wb") as stderr:
        process = subprocess.Popen(
            [PEDIGREE, "run", str(long_recipe), "--json"],
            env=home.environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    assert "2 processes, weights in 2 shards" in until_steps(home.path, 3).read_text()
    ranks = [p for p in processes_of(home.path) if "training.main" in " ".join(p.cmdline())]
    assert len(ranks) >= 3, "torchrun and two ranks"
    # Ctrl-C in a terminal reaches the whole foreground group; the command leads its own.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    deadline = time.monotonic() + SECONDS_TO_END
    while (left := [p for p in processes_of(home.path) if p.pid != process.pid]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    process.wait(60)
    if number == signal.SIGINT:
        last = json.loads(output.read_text())["assets"][-1]
        assert (last["asset"], last["outcome"]) == ("policy", "failed")
        assert_cancelled(home.path, last["error"], f"`pedigree run {long_recipe}`")
        assert last["fingerprint"] is None
        assert process.returncode == 1 and "Traceback" not in log.read_text()


def assert_cancelled(home: Path, error: str, command: str) -> None:
    """Check that the last run counts as stopped by a user, and that the error names the existing checkpoint."""
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        run = instance.get_runs(limit=1)[0]
        events = [entry.dagster_event for entry in instance.all_logs(run.run_id) if entry.dagster_event]
    assert run.status == dg.DagsterRunStatus.CANCELED
    assert [event.step_failure_data.error.stack for event in events if event.is_step_failure] == [[]]
    assert dg.DagsterEventType.RUN_FAILURE not in {event.event_type for event in events}
    last = max(home.glob("jobs/policy-*/checkpoints/*/step-*[0-9]"))
    step, folder = int(last.name.removeprefix("step-")), last.parents[2]
    check_values(error, "interrupted", f"checkpoint of step {step:,} ", folder, command)


def test_killed_run_resumes_from_its_checkpoint(small_recipe, without_policy, materialized):
    """The resumed run's losses equal those of an undisturbed run, bit for bit. No run counts as running."""
    home, (undisturbed, report) = without_policy, materialized
    process = subprocess.Popen(
        [PEDIGREE, "run", str(small_recipe), "--json"],
        env=home.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until_steps(home.path, 5)
    process.kill()
    process.wait(60)
    again = home.run(str(small_recipe))
    with dg.DagsterInstance.from_config(str(home.path / "dagster")) as instance:
        runs = [run.status.value for run in instance.get_runs()]
    assert runs[:2] == ["SUCCESS", "FAILURE"] and set(runs[2:]) == {"SUCCESS"}
    resumed, whole = (
        [(e["step"], e["loss"]) for e in steps_of(*run)] for run in ((home, again), (undisturbed, report))
    )
    assert resumed == whole
    assert fingerprint(again, "policy") == fingerprint(report, "policy")


def fingerprint(report, asset):
    return next(a["fingerprint"] for a in report["assets"] if a["asset"] == asset)
