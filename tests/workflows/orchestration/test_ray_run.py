"""`pedigree run` with a real Ray: the job outlives a killed command, and the next one follows it to the same bits."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.training.launch.cluster.ray_cluster import ray_cluster
from tests.workflows.commands.test_run_interruption import until_steps
from tests.workflows.homes import PEDIGREE, Home, copy_without_policy

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.xdist_group("ray")]


@pytest.fixture
def home(first_run, tmp_path, tmp_path_factory, monkeypatch) -> Iterator[Home]:
    """Return a copy of the home in which everything but the policy was made, with a Ray of two nodes."""
    home = copy_without_policy(first_run[0], tmp_path / "home")
    with ExitStack() as running:
        cluster = running.enter_context(ray_cluster(tmp_path_factory.mktemp("ray"), {}))
        running.enter_context(cluster.head())
        running.enter_context(cluster.node())
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.setenv(name, cluster.environment[name])
        profile = "{default: {env: {OMP_NUM_THREADS: 1}}}"
        (home.path / "engine.yaml").write_text(f"engine: ray\naddress: {cluster.address}\nprofiles: {profile}\n")
        yield home


def test_killed_command_leaves_its_job_which_the_next_one_follows(home: Home, first_run, small_recipe: Path) -> None:
    process = subprocess.Popen(
        [PEDIGREE, "run", str(small_recipe)],
        env=home.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until_steps(home.path, 2)
    process.kill()
    process.wait()
    assert home.pedigree("gc", "--delete").returncode == 0
    again = home.pedigree("run", str(small_recipe), "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    fingerprints = [{a["asset"]: a["fingerprint"] for a in run["assets"]} for run in (report, first_run[1])]
    assert fingerprints[0] == fingerprints[1]
