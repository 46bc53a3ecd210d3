"""Jobs on several machines: the conductor, a process here, starts one on each machine through its command prefix.

    launcher ──pipe──> conductor ──> ssh -T gpu-1 ──> node.py ──> torchrun ──> ranks
                            └──────> ssh -T gpu-2 ──> node.py ──> torchrun ──> ranks

It stands where the supervisor stands on one machine, with the same guarantee: when the launcher dies or cancels, all processes
are ended, here and there, and the lock of the key is free only then. One node that fails ends the job: the conductor
ends the others and says why. The log has the lines of all nodes, each with the number of its node.
"""

import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from training.contract.errors import NodesError
from training.contract.identity.file_hashing import hash_file
from training.contract.protocol.job import Failure, Job
from training.launch.local import LocalHandle, LocalLauncher, start_process
from training.launch.node import Order, Word, software
from training.launch.nodes_file import Nodes, take_nodes
from training.launch.remote_node import RemoteNode, write
from training.launch.supervisor import CANCELLED, ignore_signals, restore_signals

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 120.0  # for a connection, and for a Python that lies on a network file system
_CLOSING_SECONDS = 10.0  # beyond the grace of the job, for the connection
# Variables for computing and communication, which are passed on. All others are the machine's own; none of these is a secret.
_PASSED_ON = ("TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUBLAS_")


class NodesLauncher:
    """Jobs on the machines of `nodes.yaml` where they ask for several, else on this one."""

    def __init__(self, nodes_file: Path, module: str = "training.main"):
        self._nodes_file, self._module = nodes_file, module

    def find(self, job: Job) -> None:
        """Return None: a job on these machines ends with its launcher."""

    def start(self, job: Job, lock: BinaryIO | None = None) -> LocalHandle:
        """Raises NodesError if the file does not give the machines the job asks for."""
        if job.nodes == 1:
            return LocalLauncher(self._module).start(job, lock)
        nodes = take_nodes(self._nodes_file, job.nodes).model_dump_json()
        command = [sys.executable, "-P", "-m", "training.launch.conductor", nodes, self._module, str(job.path)]
        return start_process(job, command, dict(os.environ), lock)


def conduct(listed: Nodes, module: str, job: Job) -> int:
    """Run the job on all nodes; the status is that of the first node that failed, or CANCELLED."""
    launcher = os.getppid()
    nodes = [RemoteNode(node, order) for node, order in zip(listed.nodes, _orders(listed, module, job), strict=True)]
    try:
        failed = _follow(nodes, launcher)
        if failed is None:
            return 0 if all(node.succeeded() for node in nodes) else CANCELLED
        if (problem := failed.problem()) is not None:
            Failure(type=NodesError.__name__, message=problem, rank=None, traceback="").write_first(job.error)
    finally:
        ignore_signals()
        _end(nodes, job.grace_seconds + _CLOSING_SECONDS)
    # Only now, so that it is the end of the log: the other nodes wrote lines while they were ended.
    write(problem or "\n".join([f"the first to end badly was {failed.name}, after it said", *failed.last_lines]))
    return max(failed.status() or 0, 1)


def _orders(nodes: Nodes, module: str, job: Job) -> list[Order]:
    common = Order(
        node=0,
        addresses=tuple(node.address for node in nodes.nodes),
        port=nodes.port,
        module=module,
        job=job.path,
        sha256=hash_file(job.path),
        software=software(),
        environment={name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
    )
    return [common.model_copy(update={"node": number}) for number in range(len(nodes.nodes))]


def _follow(nodes: Sequence[RemoteNode], launcher: int) -> RemoteNode | None:
    """Wait for the end of the job or of the launcher; returns the first node that failed, or has not answered in time."""
    deadline, started = time.monotonic() + _ANSWER_SECONDS, False
    while os.getppid() == launcher and not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        late = time.monotonic() > deadline
        for node in nodes:
            failed = node.status() is not None and not node.succeeded()
            if failed or (late and node.word is None):
                return node
        if all(node.succeeded() for node in nodes):
            break
        if not started and all(node.word == Word.READY for node in nodes):
            for node in nodes:
                node.send("go")
            started = True
    return None


def _end(nodes: Sequence[RemoteNode], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for node in nodes:
        node.close()
    for node in nodes:
        node.wait(deadline - time.monotonic())


if __name__ == "__main__":
    restore_signals()
    sys.exit(conduct(Nodes.model_validate_json(sys.argv[1]), sys.argv[2], Job.read(Path(sys.argv[3]))))
