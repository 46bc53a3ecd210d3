"""Runs outside any allocation, with a real Slurm: a job outlives its run, and the next run follows it.

Preempted, without its node or at its time limit, a job is finished by the one command, with the bits of an undisturbed run.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.training.launch.cluster.slurm_cluster import missing_programs, slurm_cluster
from tests.workflows.commands.test_run_interruption import LONG, processes_of, until_steps
from tests.workflows.homes import ATTRIBUTES, PEDIGREE, Home, copy_without_policy, write_recipe
from tests.workflows.orchestration.killed_command import check_next_command_follows_the_job
from tests.workflows.servers.served import served_pages
from tests.workflows.servers.test_termination import LAUNCH, REPOSITORY, TERMINATE, until
from tests.workflows.servers.test_web_servers import graphql

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(1500)]


@pytest.fixture
def home(first_run, tmp_path, monkeypatch) -> Iterator[Home]:
    """Return a copy of the home in which everything but the policy was made, with a Slurm of two nodes."""
    if missing := missing_programs():
        pytest.fail(f"these tests need Slurm ({', '.join(missing)}): apt-get install -y slurm-wlm munge")
    home = copy_without_policy(first_run[0], tmp_path / "home")
    (home.path / "engine.yaml").write_text("engine: slurm\n")
    (folder := tmp_path / "slurm").mkdir()
    with slurm_cluster(folder) as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        yield home
        if subprocess.run(["scancel", "--me"]).returncode == 0:  # else the test has ended the controller
            until(lambda: not queue(), 60)


@pytest.mark.system
def test_killed_command_leaves_its_job_which_the_next_one_follows(home: Home, first_run, small_recipe: Path) -> None:
    """The policy has the bits of a run on this machine."""
    check_next_command_follows_the_job(home, small_recipe, first_run[1])
    jobs = subprocess.run(["scontrol", "show", "job", "--oneliner"], capture_output=True, text=True, check=True).stdout
    assert jobs.count("JobName=policy-") == jobs.count("JobId=") == 1, "one submission in all"
    assert processes_of(home.path) == []


@pytest.fixture
def long_recipe(tmp_path: Path, small_recipe: Path) -> Path:
    return recipe_with(tmp_path, small_recipe, LONG)


def recipe_with(folder: Path, small_recipe: Path, attributes: dict[str, object]) -> Path:
    recipe = write_recipe(folder / "small", attributes)
    for name in ("preferences.jsonl", "base"):
        (recipe / name).symlink_to(small_recipe / name)
    return recipe


def start_run(home: Home, recipe: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [PEDIGREE, "run", str(recipe), "--json"],
        env=home.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def queue() -> list[str]:
    """Return the ids of the jobs that wait or run."""
    command = ["squeue", "--noheader", "--format=%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def assert_nothing_is_left(home: Home, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while (left := [*queue(), *processes_of(home.path)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.system
def test_terminated_command_leaves_its_job_and_ctrl_c_cancels_it(home: Home, long_recipe: Path) -> None:
    """Between the two, `status` and `plan` show the live job. The second command follows it."""
    first = start_run(home, long_recipe)
    until_steps(home.path, 2)
    first.terminate()
    report = json.loads(first.communicate(timeout=60)[0])
    assert "its job goes on in the queue" in report["assets"][-1]["error"]
    [id] = queue()
    status = {
        asset["asset"]: asset
        for asset in json.loads(home.pedigree("status", str(long_recipe), "--json").stdout)["assets"]
    }
    assert status["policy"]["job"].startswith(f"job {id} runs on n") and status["evaluation"]["job"] is None
    plan = {
        asset["asset"]: asset
        for asset in json.loads(home.pedigree("plan", str(long_recipe), "--json").stdout)["assets"]
    }
    assert any(f"a run follows its job: job {id} runs on n" in note for note in plan["policy"]["notes"])
    second = start_run(home, long_recipe)
    until(lambda: observed(home, f"job {id} runs on") == 2)
    os.killpg(second.pid, signal.SIGINT)
    second.wait(60)
    assert_nothing_is_left(home)


def observed(home: Home, text: str) -> int:
    """Return how many observations on the page of the policy have the text."""
    with dg.DagsterInstance.from_config(str(home.path / "dagster")) as instance:
        records = instance.fetch_observations(dg.AssetKey(["small", "policy"]), limit=10).records
    found = [record.asset_observation for record in records]
    return sum(text in (observation.description or "") for observation in found if observation is not None)


@pytest.mark.system
def test_job_of_a_stopped_server_is_followed_after_its_next_start(
    home: Home, small_recipe: Path, tmp_path: Path
) -> None:
    """The sensor requests a run, which follows the same job. Terminating that run cancels the job."""
    long_recipe = recipe_with(tmp_path, small_recipe, {**LONG, "automation": {"on_change": False}})
    with served_pages(home.path, long_recipe, home.environment) as served:
        params = {"selector": {**REPOSITORY, "jobName": "small_retrain"}, "mode": "default"}
        first = graphql(served.dagster, LAUNCH, params=params)["launchPipelineExecution"]["run"]["runId"]
        until_steps(home.path, 2)
    submitted = queue()
    assert len(submitted) == 1
    with (
        served_pages(home.path, long_recipe, home.environment) as served,
        dg.DagsterInstance.from_config(str(home.path / "dagster")) as instance,
    ):

        def followers() -> list[str]:
            runs = instance.get_runs(dg.RunsFilter(job_name="small_retrain", statuses=[dg.DagsterRunStatus.STARTED]))
            return [run.run_id for run in runs if run.run_id != first]

        [second] = until(followers)
        job = next(home.path.glob("jobs/policy-*/job.json"))
        key = json.loads((job.parent / "engine.json").read_text())["id"]
        assert [key] == submitted == queue()
        until(
            lambda: (
                f"job {key} runs on"
                in "".join(entry.user_message for entry in instance.all_logs(second) if not entry.is_dagster_event)
            )
        )
        assert graphql(served.dagster, TERMINATE, run=second)["terminateRun"]["__typename"] == "TerminateRunSuccess"
        until(lambda: not queue(), 30)
        until(lambda: instance.get_run_by_id(second).status == dg.DagsterRunStatus.CANCELED, 60)


STEPS = 600
FAULTED = {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], "max_steps": STEPS}}


def preempt() -> None:
    command = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"]
    subprocess.run(command, check=True, capture_output=True)


def lose_the_node() -> None:
    command = ["squeue", "--noheader", "--format=%N"]
    [node] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)


def reach_the_limit() -> None:
    """Send the signal that Slurm sends before the limit."""
    [id] = queue()
    subprocess.run(["scancel", "--batch", "--signal=USR1", id], check=True)


@pytest.fixture(scope="module")
def undisturbed(first_run, tmp_path_factory, small_recipe: Path) -> dict[str, str]:
    """Return the fingerprints of a run on this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    report = Home(folder / "home").run(str(recipe_with(folder, small_recipe, FAULTED)))
    return {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}


@pytest.mark.long  # Slurm lets two minutes pass before it starts a requeued job
@pytest.mark.parametrize("fault", [preempt, lose_the_node, reach_the_limit])
def test_disturbed_job_is_finished_by_the_same_command(
    home: Home, undisturbed, small_recipe: Path, tmp_path: Path, fault: Callable[[], None]
) -> None:
    process = start_run(home, recipe_with(tmp_path, small_recipe, FAULTED))
    until_steps(home.path, 20)
    fault()
    output, errors = process.communicate(timeout=900)
    report = json.loads(output)
    assert report["succeeded"], errors
    assert {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}["policy"] == undisturbed["policy"]
    text = (
        next(home.path.glob("jobs/policy-*/events.jsonl")).read_text() if any(home.path.glob("jobs/policy-*")) else ""
    )
    assert "resumed" in text or "start number 2" in errors


@pytest.mark.long
def test_controller_that_is_killed_and_restarted_does_not_disturb_the_job(
    home: Home, undisturbed, small_recipe: Path, tmp_path: Path
) -> None:
    process = start_run(home, recipe_with(tmp_path, small_recipe, FAULTED))
    until_steps(home.path, 20)
    config = os.environ["SLURM_CONF"]
    pid = int(Path(config).with_name("slurmctld.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    time.sleep(12)  # the run asks meanwhile
    with subprocess.Popen(
        ["/usr/sbin/slurmctld", "-D"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as controller:
        report = json.loads(process.communicate(timeout=600)[0])
        controller.terminate()
    fingerprints = {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}
    assert fingerprints["policy"] == undisturbed["policy"]
