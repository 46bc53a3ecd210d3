"""Fixtures for tests of jobs: a tiny model with its data, and a process that forks ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.training.tiny_inputs import TinyInputs, build_tiny_inputs
from training.contract.protocol.job import Job


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: tiny tensors do not gain from more, and threads of parallel tests wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def session_inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyInputs:
    return build_tiny_inputs(tmp_path_factory.mktemp("world"))


@pytest.fixture
def tiny_inputs(session_inputs: TinyInputs, tmp_path: Path) -> TinyInputs:
    return session_inputs.copied_to(tmp_path)


@dataclass(frozen=True)
class Forker:
    """Runs jobs on forked ranks, in a process that has imported all modules (`programs/fork_program.py`)."""

    process: "subprocess.Popen[str]"

    def run(self, job: Job, world: int = 1, nodes: int = 1, **end: float) -> list[int]:
        """Run a job and publish its artifact. Return the exit status of each rank."""
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
