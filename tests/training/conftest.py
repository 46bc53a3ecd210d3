"""What tests of jobs share: a tiny world, a workshop for real jobs in this process, and a forker of ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.training.worlds import TinyWorld, build_world
from training.contract.protocol.job import Job


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, which wait for each other in a loop where tests run side by side."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def untouched_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def tiny_world(untouched_world: TinyWorld, tmp_path: Path) -> TinyWorld:
    return untouched_world.copied_to(tmp_path)


@dataclass(frozen=True)
class Forker:
    """Runs jobs on forked ranks, in a process that has imported everything: `fork_program` says how."""

    process: "subprocess.Popen[str]"

    def run(self, job: Job, world: int = 1, nodes: int = 1, **end: float) -> list[int]:
        """The exit status of each rank of a whole job, published when it ends well."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": str(job.path), "world": world, "nodes": nodes, "end": end}) + "\n")
        self.process.stdin.flush()
        statuses: list[int] = json.loads(self.process.stdout.readline())
        return statuses


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    program = Path(__file__).parent / "programs" / "fork_program.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        yield Forker(process)
        assert process.stdin is not None
        process.stdin.close()
