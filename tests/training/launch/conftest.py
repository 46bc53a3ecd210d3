"""Jobs that do what a test asks: the programs in `programs/` run them instead of real work."""

from collections.abc import Callable
from pathlib import Path

import pytest

from training.contract.job import Job
from training.contract.recipe import Compute

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(act: str, ranks: int = 1) -> Job:
        return Job(
            kind="policy",
            artifact="policy",
            code_version="1",
            inputs={},
            settings={"act": act},
            locations={},
            compute=Compute(processes_per_node=ranks, device="cpu", grace_seconds=1),
            recipe={},
            store=tmp_path / "store",
            folder=tmp_path / "job",
        )

    return make
