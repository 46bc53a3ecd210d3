"""Jobs on two nodes, which are real connections to a real ssh server: what they make, how they fail, what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.contract.errors import JobFailed, NodesError
from training.contract.events import Event, read_events
from training.contract.job import Job
from training.contract.recipe import Training
from training.contract.store import Store
from training.launch.conductor import NodesLauncher
from training.launch.launcher import prepare, run_job

MakeJob = Callable[..., Job]
WriteNodes = Callable[..., Path]


@pytest.fixture
def write_nodes(tmp_path: Path, free_port: Callable[[], int]) -> WriteNodes:
    """Writes a nodes.yaml of nodes with these prefixes and gives its path."""

    def write(*prefixes: list[str], **options: Any) -> Path:
        nodes = [{"run": prefix, "address": "127.0.0.1", **options} for prefix in prefixes]
        path = tmp_path / "nodes.yaml"
        path.write_text(json.dumps({"port": free_port(), "nodes": nodes}))  # JSON is YAML
        return path

    return write


def test_x(ssh, make_job, write_nodes):
    job = make_job("write", nodes=2)
    file = write_nodes(ssh, ssh)
    try:
        run_job(NodesLauncher(file, "ranked_program"), job, print)
    finally:
        print(job.log.read_text())
