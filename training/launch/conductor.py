"""Jobs on several machines: one process here, the conductor, leads one on each machine, started through its prefix.

    launcher ──pipe──> conductor ──> ssh -T gpu-1 ──> node.py ──> torchrun ──> ranks
                            └──────> ssh -T gpu-2 ──> node.py ──> torchrun ──> ranks

It stands where a supervisor stands on one machine, and keeps its promise: when the launcher dies or cancels, everything is
ended, here and there, and the lock of the key is free only then. One node that ends badly ends the job: the conductor
ends the others and says why. The log has the lines of all nodes, each with the number of its node.
"""

import hashlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from training.contract.errors import NodesError
from training.contract.job import Failure, Job
from training.launch.local import LocalHandle, LocalLauncher, start_process
from training.launch.node import Order, Word, software
from training.launch.nodes_file import Nodes, take_nodes
from training.launch.station import Station, write
from training.launch.supervisor import CANCELLED, SIGNALS, restore_signals

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 120.0  # for a connection, and for a Python that lies on a network file system
_FAREWELL_SECONDS = 10.0  # beyond the grace of the job, for the connection
# What a user has set for computing and communicating. Everything else is the machine's own, and no token is among these.
_HANDED_ON = ("TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUBLAS_")


class NodesLauncher:
    """Jobs on the machines of `nodes.yaml` where they ask for several, else on this one."""

    def __init__(self, nodes_file: Path, module: str = "training.main"):
        self._nodes_file, self._module = nodes_file, module

    def start(self, job: Job, lock: BinaryIO | None = None) -> LocalHandle:
        """Raises NodesError if the file does not give the machines the job asks for."""
        if job.nodes == 1:
            return LocalLauncher(self._module).start(job, lock)
        nodes = take_nodes(self._nodes_file, job.nodes).model_dump_json()
        command = [sys.executable, "-P", "-m", "training.launch.conductor", nodes, self._module, str(job.path)]
        return start_process(job, command, dict(os.environ), lock)


def conduct(nodes: Nodes, module: str, job: Job) -> int:
    """Lead the job to its end on all nodes; the status is that of the first that ended badly, or CANCELLED."""
    launcher = os.getppid()
    stations = [Station(node, order) for node, order in zip(nodes.nodes, _orders(nodes, module, job), strict=True)]
    try:
        failed = _follow(stations, launcher)
        if failed is None:
            return 0 if all(station.has_done_well() for station in stations) else CANCELLED
        if (account := failed.account()) is not None:
            Failure(type=NodesError.__name__, message=account, rank=None, traceback="").write_first(job.error)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _end(stations, job.grace_seconds + _FAREWELL_SECONDS)
    # At the end, since what the others said when they were ended has come after it.
    write(account or "\n".join([f"the first to end badly was {failed.name}, after it said", *failed.last_lines]))
    return max(failed.status() or 0, 1)


def _orders(nodes: Nodes, module: str, job: Job) -> list[Order]:
    common = Order(
        node=0,
        addresses=tuple(node.address for node in nodes.nodes),
        port=nodes.port,
        module=module,
        job=job.path,
        sha256=hashlib.sha256(job.path.read_bytes()).hexdigest(),
        software=software(),
        environment={name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON)},
    )
    return [common.model_copy(update={"node": number}) for number in range(len(nodes.nodes))]


def _follow(stations: Sequence[Station], launcher: int) -> Station | None:
    """Until all have ended or the launcher wants it to end; or the first that ended badly, or has not answered in time."""
    deadline, told = time.monotonic() + _ANSWER_SECONDS, False
    while os.getppid() == launcher and not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        late = time.monotonic() > deadline
        for station in stations:
            ended = station.status() is not None and not station.has_done_well()
            if ended or (late and station.word is None):
                return station
        if all(station.has_done_well() for station in stations):
            break
        if not told and all(station.word == Word.READY for station in stations):
            for station in stations:
                station.tell("go")
            told = True
    return None


def _end(stations: Sequence[Station], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for station in stations:
        station.hang_up()
    for station in stations:
        station.wait(deadline - time.monotonic())


if __name__ == "__main__":
    restore_signals()
    sys.exit(conduct(Nodes.model_validate_json(sys.argv[1]), sys.argv[2], Job.read(Path(sys.argv[3]))))
