"""Two agents of torchrun with two ranks each, as a person starts them on two machines with a shared folder."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training.contract.events import read_events
from training.contract.recipe import Training
from training.contract.store import Store

pytestmark = pytest.mark.slow
SETTINGS = {"batch_size": 8, "max_steps": 4, "optimizer": {"learning_rate": 3e-3}}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def agent(job: Path, address: str, log: Path) -> "subprocess.Popen[bytes]":
    """The command of docs/architecture.md, on loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        address,
        "--rdzv-id",
        "policy",
        "--local-addr",
        "127.0.0.1",
    ]
    command += ["-m", "training.main", str(job)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def test_two_nodes_of_two_ranks_share_one_job(tiny_world: Any, forker: Any):
    settings = Training.model_validate(SETTINGS).model_dump(mode="json")
    alone = tiny_world.job("policy", settings, "alone")
    assert forker.run(alone) == [0]
    job, address = tiny_world.job("policy", settings, "nodes", parallel="hsdp"), f"127.0.0.1:{free_port()}"
    logs = [job.folder / f"node-{node}.log" for node in range(2)]
    agents = [agent(job.path, address, log) for log in logs]
    try:
        statuses = [process.wait(120) for process in agents]
    finally:
        for process in agents:
            process.kill()
            process.wait()
    assert statuses == [0, 0], "".join(log.read_text()[-2000:] for log in logs)
    events = []
    for one in (alone, job):
        found = Store(one.store).find("policy", one.derivation.key)
        assert found is not None
        events.append(list(read_events(found.folder / "events.jsonl")))
    assert "4 processes, weights in 2 shards, 2 times (hsdp: as the recipe says)" in [e.get("text") for e in events[1]]
    losses = [[e["loss"] for e in told if e["event"] == "step"] for told in events]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
