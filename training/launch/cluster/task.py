"""The task of one node of a cluster: check that this machine can run the job, then become torchrun.

`python -P -m training.launch.cluster.task JOB.json SHA256 MODULE`, as the batch script of Slurm starts it on each node. The
environment has the number of this node and the address of the first one.
"""

import hashlib
import os
import platform
import socket
import sys
from pathlib import Path

from training.contract.errors import EngineError, PedigreeError
from training.contract.protocol.job import Failure, Job
from training.launch.local import environment, torchrun
from training.launch.meeting import interface_of

_FIRST_PORT, _PORTS = 20_000, 10_000
_SHARE = "every machine must have the folder of PEDIGREE_HOME, and the models, at the same path"


def check_job(path: Path, sha256: str) -> Job:
    """Return the job. Raises EngineError if this machine sees other files than the one that submitted it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EngineError(f"{platform.node()} cannot read {path}: {error.strerror}; {_SHARE}", "not-shared") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise EngineError(f"{path} on {platform.node()} is not the submitted one; {_SHARE}", "not-shared")
    job = Job.model_validate_json(content)
    for name, given in job.inputs.items():
        if not given.folder.exists():
            raise EngineError(f"{platform.node()} has no {given.folder}, which holds {name}; {_SHARE}", "not-shared")
    return job


def command_of(job: Job, module: str, node: int, first: str, number: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of this node, and its environment. `number`: of the job in the queue, for a free port."""
    program = ["-m", module, str(job.path)]
    if job.nodes == 1 and job.processes == 1:
        return [sys.executable, *program], {}
    port = _FIRST_PORT + number % _PORTS
    own = _own_address(first, port)
    interface = interface_of(own)
    options = [
        *("--nnodes", str(job.nodes), "--node-rank", str(node), "--local-addr", own, "--rdzv-backend", "static"),
        *("--rdzv-id", job.derivation.key, "--rdzv-endpoint", f"{first}:{port}"),
    ]
    # The sign makes NCCL take this interface alone, not another one whose name begins so.
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return [*torchrun(job), *options, *program], sockets


def _own_address(first: str, port: int) -> str:
    """Return the address of this machine on the network of `first`. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, port))
        return str(probe.getsockname()[0])


def main(path: Path, sha256: str, module: str) -> int:
    """Replace this process by that of the job. Return 1, with the reason in error.json, if this machine cannot run it."""
    try:
        job = check_job(path, sha256)
        first = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
        command, sockets = command_of(
            job, module, int(os.environ["SLURM_NODEID"]), first, int(os.environ["SLURM_JOB_ID"])
        )
    except (PedigreeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        Failure(type=type(error).__name__, message=str(error), rank=None, traceback="").write_first(
            path.with_name("error.json")
        )
        return 1
    os.execvpe(command[0], command, {**sockets, **environment(os.environ, job.processes)})
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
