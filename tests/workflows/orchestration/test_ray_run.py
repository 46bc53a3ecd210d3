"""`pedigree run` with a real Ray: the job outlives a killed command, and the next one follows it to the same bits."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.training.launch.cluster.ray_cluster import ray_cluster
from tests.workflows.homes import Home, copy_without_policy
from tests.workflows.orchestration.killed_command import check_next_command_follows_the_job

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
    check_next_command_follows_the_job(home, small_recipe, first_run[1])
