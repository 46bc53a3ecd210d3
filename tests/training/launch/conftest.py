"""Jobs that run the programs in `programs/`."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import training
from tests import factories
from training.contract.config.recipe import Compute
from training.contract.protocol.job import Job

PROGRAMS = Path(__file__).parent / "programs"
# The programs and the tested package.
PYTHONPATH = os.pathsep.join([str(PROGRAMS), str(Path(training.__file__).parents[1])])


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(act: str, ranks: int = 1, nodes: int = 1) -> Job:
        compute = Compute(processes_per_node=ranks, nodes=nodes, device="cpu", grace_seconds=1)
        return factories.job("policy", tmp_path, compute=compute, code_version=act)

    return make
