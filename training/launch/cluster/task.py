"""The task of one node of a cluster: check that this machine can run the job, then become torchrun.

`python -P -m training.launch.cluster.task JOB.json SHA256 MODULE`, as the batch script of Slurm starts it on each node. The
environment has the number of this node, and the address and the port of the first one.
"""

import hashlib
import json
import os
import platform
import sys
from pathlib import Path

from training.contract.errors import EngineError, PedigreeError
from training.contract.identity.fingerprint import short
from training.contract.identity.software import library_versions, source_digest
from training.contract.protocol.job import Failure, Job
from training.launch.cluster.network import interface_of, own_address
from training.launch.local import environment, torchrun

PORT = "PEDIGREE_PORT"  # the variable with the port at which the ranks meet
_SHARE = "every machine must have the folder of PEDIGREE_HOME, and the models, at the same path"


def write_software(job: Job) -> None:
    """Write the software of this machine into the job's folder, for the check on the nodes."""
    software_of(job.path).write_text(json.dumps(software()), encoding="utf-8")


def software_of(path: Path) -> Path:
    return path.with_name("software.json")


def software() -> dict[str, str]:
    """Return what must be equal on all machines of a job: Python, libraries, and the source of this package."""
    return {**library_versions(), "the source of Pedigree": short(source_digest())}


def check_job(path: Path, sha256: str) -> Job:
    """Return the job. Raises EngineError if this machine has other files, or other software, than the one that submitted it."""
    node = platform.node()
    try:
        content, submitted = path.read_bytes(), json.loads(software_of(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{node} cannot read {error.filename}: {error.strerror}; {_SHARE}", "not-shared") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise EngineError(f"{path} on {node} is not the submitted one; {_SHARE}", "not-shared")
    here = software()
    if others := [
        f"{name} {here.get(name, 'none')}, not {version}"
        for name, version in submitted.items()
        if here.get(name) != version
    ]:
        raise EngineError(
            f"{node} ({sys.executable}) has other software than the machine that submitted the job: {'; '.join(others)}. Use "
            "one environment on all machines, or name it in `python` of engine.yaml",
            "other-software",
        )
    job = Job.model_validate_json(content)
    for name, given in job.inputs.items():
        if not given.folder.exists():
            raise EngineError(f"{node} has no {given.folder}, which holds {name}; {_SHARE}", "not-shared")
    return job


def command_of(job: Job, module: str, node: int, first: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of this node, and its environment. The ranks meet at `port` of the address `first`."""
    program = ["-m", module, str(job.path)]
    if job.nodes == 1 and job.processes == 1:
        return [sys.executable, *program], environment(os.environ, 1)
    own = own_address(first)
    interface = interface_of(own)
    options = [
        *("--nnodes", str(job.nodes), "--node-rank", str(node), "--local-addr", own, "--rdzv-backend", "static"),
        *("--rdzv-id", job.derivation.key, "--rdzv-endpoint", f"{first}:{port}"),
    ]
    # The sign makes NCCL take this interface alone, not another one whose name begins so.
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return [*torchrun(job), *options, *program], {**sockets, **environment(os.environ, job.processes)}


def report(error: Exception, path: Path) -> None:
    """Write the reason for which this machine cannot run the job to the log and to error.json."""
    sys.stderr.write(f"{error}\n")
    failure = Failure(type=type(error).__name__, message=str(error), rank=None, traceback="")
    failure.write_first(path.with_name("error.json"))


def main(path: Path, sha256: str, module: str) -> int:
    """Replace this process by that of the job. Return 1 if this machine cannot run it."""
    try:
        job = check_job(path, sha256)
        node, first = int(os.environ["SLURM_NODEID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"]
        command, variables = command_of(job, module, node, first, int(os.environ[PORT]))
    except (PedigreeError, OSError) as error:
        report(error, path)
        return 1
    os.execvpe(command[0], command, variables)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
