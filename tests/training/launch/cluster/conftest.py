"""A real Slurm and a real Ray on this machine, for the tests of a module. Their daemons listen on all addresses."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.training.launch.cluster.ray_cluster import RayCluster, authenticate, ray_cluster
from tests.training.launch.cluster.slurm_cluster import missing_programs, slurm_cluster
from tests.training.launch.conftest import PYTHONPATH

_SECONDS = 60.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the configuration file of a Slurm of two nodes."""
    if missing := missing_programs():
        pytest.fail(f"these tests need Slurm ({', '.join(missing)}): apt-get install -y slurm-wlm munge")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as config:
        yield config


@pytest.fixture
def use_slurm(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the cluster, and cancel what a test leaves in its queue."""
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    yield
    subprocess.run(["scancel", "--me"], check=True)
    deadline = time.monotonic() + _SECONDS
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Yield a Ray of two nodes."""
    with ExitStack() as running:
        folder = tmp_path_factory.mktemp("ray")
        cluster = running.enter_context(ray_cluster(folder, {"PYTHONPATH": PYTHONPATH}))
        running.enter_context(cluster.head())
        running.enter_context(cluster.node())
        yield cluster


@pytest.fixture
def use_ray(ray_nodes: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """Return the cluster, of which this process is a client."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, ray_nodes.environment[name])
    authenticate(Path(ray_nodes.environment["RAY_AUTH_TOKEN_PATH"]))
    return ray_nodes
