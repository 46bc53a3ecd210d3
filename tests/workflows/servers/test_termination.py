"""A training that a user terminates in the web UI stays stopped until something changes; real servers, real daemon."""

import json
import shutil
import subprocess
import time

import dagster as dg
import pytest

from tests.workflows.commands.test_run_interruption import LONG, until_steps
from tests.workflows.homes import check_values, write_recipe
from tests.workflows.servers.served import served_pages
from tests.workflows.servers.test_web_servers import LOCATION, graphql

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1500)]
REPOSITORY = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}
LAUNCH = """mutation ($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } } }"""
TERMINATE = "mutation ($run: String!) { terminateRun(runId: $run) { __typename } }"
TICKS = """query ($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor {
  sensorState { ticks(limit: 20) { timestamp status } } } } }"""
SENSORS = ("small_automation", "small_data_sensor")


@pytest.fixture
def recipe(tmp_path, small_recipe):
    """Return a recipe that trains for minutes, with data of its own."""
    folder = write_recipe(tmp_path / "small", LONG)
    shutil.copy(small_recipe / "preferences.jsonl", folder)
    (folder / "base").symlink_to(small_recipe / "base")
    return folder


@pytest.fixture
def served(first_run, recipe, tmp_path):
    """Yield Dagster's server over a copy of the home in which the recipe was run with fewer steps, and that copy."""
    home = tmp_path / "home"
    subprocess.run(["cp", "--archive", first_run[0].path, home], check=True)
    shutil.rmtree(home / "jobs")
    with served_pages(home, recipe, first_run[0].environment) as served:
        yield served.dagster, home


def until(ready, seconds=300):
    """Wait until `ready` gives something, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, ready
        time.sleep(1)
    return found


def ticks_after(address, sensor, moment):
    found = graphql(address, TICKS, selector={**REPOSITORY, "sensorName": sensor})
    ticks = found["sensorOrError"]["sensorState"]["ticks"]
    return sum(tick["timestamp"] > moment and tick["status"] in ("SKIPPED", "SUCCESS") for tick in ticks)


def test_a_terminated_training_is_started_again_only_by_a_change(served, recipe):
    server, home = served
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        before = {run.run_id for run in instance.get_runs()}
        params = {"selector": {**REPOSITORY, "jobName": "small_retrain"}, "mode": "default"}
        run = graphql(server, LAUNCH, params=params)["launchPipelineExecution"]["run"]["runId"]
        job = until_steps(home, 3).parent
        until(lambda: ticks_after(server, "small_automation", 0))  # the daemon is at work
        assert graphql(server, TERMINATE, run=run)["terminateRun"]["__typename"] == "TerminateRunSuccess"
        [record] = until(lambda: [r for r in instance.get_run_records(dg.RunsFilter([run])) if r.end_time])
        assert record.dagster_run.status == dg.DagsterRunStatus.CANCELED
        assert_checkpoint_is_named(instance, run, job)

        until(lambda: min(ticks_after(server, sensor, record.end_time) for sensor in SENSORS) >= 3)
        assert {each.run_id for each in instance.get_runs()} == {*before, run}

        rows = (recipe / "preferences.jsonl").read_text().splitlines(keepends=True)
        (recipe / "preferences.jsonl").write_text("".join(rows[:-1]))
        until(lambda: trained_since(instance, {*before, run}))


def trained_since(instance, known):
    """Return the runs that train a policy, without the known ones."""
    policy = dg.AssetKey(["small", "policy"])
    return [run for run in instance.get_runs() if run.run_id not in known and policy in (run.asset_selection or ())]


def assert_checkpoint_is_named(instance, run, job):
    """Check that the log names the existing checkpoint and has no stack trace."""
    steps = [int(place.name.removeprefix("step-")) for place in job.glob("checkpoints/*/step-*[0-9]")]
    values = (
        "interrupted",
        f"checkpoint of step {max(steps):,} ",
        str(job),
        f"`pedigree run {job.parents[2] / 'small'}`",
    )
    entries = instance.all_logs(run)
    messages = [entry.user_message for entry in entries if not entry.is_dagster_event]
    assert any(all(value in message for value in values) for message in messages), messages
    texts = [json.dumps(entry.to_json()) for entry in entries]
    assert not [text for text in texts if "Traceback" in text or ", line " in text]
    ends = [entry.dagster_event for entry in entries if entry.is_dagster_event and entry.dagster_event.is_step_failure]
    [end] = ends
    check_values(end.step_failure_data.error.message, *values)
