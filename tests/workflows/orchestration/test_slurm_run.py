"""`pedigree run` outside any allocation, with a real Slurm: the job outlives a killed command, and the next one follows it."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.launch.cluster.slurm_cluster import missing_programs, slurm_cluster
from tests.workflows.commands.test_run_interruption import processes_of, until_steps
from tests.workflows.homes import PEDIGREE, Home

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.xdist_group("slurm")]


@pytest.fixture
def home(first_run, tmp_path, monkeypatch) -> Iterator[Home]:
    """Return a copy of the home in which everything but the policy was made, with a Slurm of two nodes."""
    if missing := missing_programs():
        pytest.fail(f"these tests need Slurm ({', '.join(missing)}): apt-get install -y slurm-wlm munge")
    home = Home(tmp_path / "home")
    shutil.copytree(first_run[0].path, home.path)
    for place in ("store/policy", "store/keys/policy", "jobs"):
        shutil.rmtree(home.path / place)
    (home.path / "engine.yaml").write_text("engine: slurm\n")
    (folder := tmp_path / "slurm").mkdir()
    with slurm_cluster(folder) as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        yield home


def test_killed_command_leaves_its_job_which_the_next_one_follows(home: Home, first_run, small_recipe: Path) -> None:
    """`gc --delete` between the two removes nothing of it. The policy has the bits of a run on this machine."""
    process = subprocess.Popen(
        [PEDIGREE, "run", str(small_recipe)],
        env=home.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until_steps(home.path, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert home.pedigree("gc", "--delete").returncode == 0
    again = home.pedigree("run", str(small_recipe), "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    fingerprints = [{a["asset"]: a["fingerprint"] for a in run["assets"]} for run in (report, first_run[1])]
    assert fingerprints[0] == fingerprints[1]
    jobs = subprocess.run(["scontrol", "show", "job", "--oneliner"], capture_output=True, text=True, check=True).stdout
    assert jobs.count("JobName=policy-") == jobs.count("JobId=") == 1, "one submission in all"
    assert processes_of(home.path) == []
