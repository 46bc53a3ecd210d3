"""The driver of a job in Ray: reserve the nodes, start an actor on each, and end all of them if one fails.

    driver (on the head) ──actor──> node process, the supervisor ──> torchrun ──> ranks      on each node

`python -P -m training.launch.cluster.ray_driver JOB.json SHA256 MODULE RESERVED`, as Ray starts it. If a node is lost after a
checkpoint of this start, the job begins again on other nodes. Without such a checkpoint it fails.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from training.contract.errors import EngineError, PedigreeError
from training.contract.protocol.job import Job, committed_steps
from training.launch.cluster.network import free_port
from training.launch.cluster.ray_files import alive_nodes, forget_placement, write_placement
from training.launch.cluster.task import check_job, report
from training.launch.supervisor import CANCELLED

_SECONDS_BETWEEN_LOOKS = 5.0
_FAILED = 1
Resources = dict[str, float]


class Reserved(TypedDict):
    """What each node of the job reserves. `threads`: of each process; None for an equal share of the machine's cores."""

    resources: Resources
    threads: int | None


class Node:
    """The actor of a node, in a worker process of Ray. If that ends, Ray kills its child, the supervisor, and all below it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def meeting_point(self) -> tuple[str, int]:
        """Return the address of this node, and a port on which nothing listens."""
        address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, free_port(address)

    def run(self, job: Job, arguments: list[str], threads: int | None) -> int:
        """Run the job's processes on this node and return their exit status."""
        if self._is_stopped:
            return CANCELLED
        command = [sys.executable, "-P", "-m", "training.launch.cluster.ray_node", str(job.path), *arguments]
        variables = dict(os.environ)
        variables.pop("OMP_NUM_THREADS", None)  # Ray has set it: the cores of the actor, for each of its processes
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        with (
            open(job.log, "ab") as log,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=variables, start_new_session=True
            ) as self._process,
        ):
            return self._process.wait()

    def stop(self) -> None:
        """End the job's processes: they may save a checkpoint. The supervisor waits for the end of its standard input."""
        self._is_stopped = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


class Lost(EngineError):
    """A node went down."""

    code = "node-lost"


def drive(job: Job, sha256: str, module: str, reserved: Reserved) -> int:
    """Run the job, again after each lost node if there is a new checkpoint. Return its exit status."""
    while True:
        before = _latest_step(job)
        try:
            return _run_once(job, sha256, module, reserved)
        except Lost as error:
            if _latest_step(job) == before:
                raise
            sys.stderr.write(f"{error}; the job begins again at its last checkpoint\n")


def _latest_step(job: Job) -> int:
    return max((step for folder in job.checkpoints.glob("*") for step in committed_steps(folder)), default=0)


def _run_once(job: Job, sha256: str, module: str, reserved: Reserved) -> int:
    resources = reserved["resources"]
    group = placement_group([resources] * job.nodes, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        _wait_for(group, job, resources)
        actors = [_actor(group, number, resources) for number in range(job.nodes)]
        first, port = ray.get(actors[0].meeting_point.remote())
        job.error.unlink(missing_ok=True)  # of an earlier start
        runs = [
            actor.run.remote(job, [sha256, module, str(number), first, str(port)], reserved["threads"])
            for number, actor in enumerate(actors)
        ]
        write_placement(job, "running", f"the job runs in Ray on {job.nodes} of its nodes, the first is {first}")
        while runs:
            ended, runs = ray.wait(runs, timeout=_SECONDS_BETWEEN_LOOKS)
            if status := max((ray.get(run) for run in ended), default=0):
                return int(status)
        return 0
    except RayActorError as error:
        raise Lost(f"a node of Ray was lost: {' '.join(str(error).split())}") from error
    finally:
        _stop(actors, job)
        remove_placement_group(group)


def _stop(actors: list[Any], job: Job) -> None:
    """Ask the actors to end their processes, wait for that, and kill the actors."""
    for actor in actors:
        actor.stop.remote()
    deadline = time.monotonic() + job.grace_seconds + _SECONDS_BETWEEN_LOOKS
    while actors and alive_nodes(job) and time.monotonic() < deadline:
        time.sleep(0.1)
    for actor in actors:
        ray.kill(actor)


def _actor(group: PlacementGroup, number: int, resources: Resources) -> Any:
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    others = {name: value for name, value in resources.items() if name not in ("CPU", "GPU")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    return ray.remote(Node).options(scheduling_strategy=place, max_concurrency=2, **options).remote()


def _wait_for(group: PlacementGroup, job: Job, resources: Resources) -> None:
    """Wait until Ray has reserved the nodes. Meanwhile write the missing resources into the placement file."""
    wanted = f"{job.nodes} nodes with {_shown(resources)} each"
    while not group.wait(timeout_seconds=_SECONDS_BETWEEN_LOOKS):
        nodes = [
            node["Resources"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        ]
        fitting = sum(all(node.get(name, 0) >= value for name, value in resources.items()) for node in nodes)
        remedy = ""
        if fitting < job.nodes:
            remedy = (
                "add nodes (`ray start --address=...`), or lower `resources` in engine.yaml: "
                f"{fitting} of {len(nodes)} nodes have them"
            )
        write_placement(job, "queued", f"the job waits in Ray for {wanted}", remedy)


def _shown(resources: Resources) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in resources.items()) or "no resources"


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(CANCELLED)


def main(path: Path, sha256: str, module: str, reserved: Reserved) -> int:
    """Drive the job to its end. Return 1, with the reason in error.json, if it cannot run."""
    try:
        job = check_job(path, sha256)
        forget_placement(job)
        ray.init(address="auto", log_to_driver=False)
        signal.signal(signal.SIGTERM, _on_sigterm)  # Ray has a handler of its own
        return drive(job, sha256, module, reserved)
    except (PedigreeError, RayError, OSError) as error:
        report(error, path)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
