"""What runs on each machine of a job: `prefix... python -P -m training.launch.node`, as the conductor starts it.

Its instructions come as the first line of standard input, since a prefix passes no environment on, and prefixes treat
quotes differently. Its messages go to standard output, a line each, or the end of one, after `MARK`:

    <- order     number and addresses of the nodes, the job, the digest of job.json, the required software, environment
    -> ready     all requirements are met here; or refused, and why
    <- go        the others are ready as well
    -> started   all machines are connected, torchrun runs below this process, its supervisor; or refused, and why
    -> ended     with torchrun's status

If standard input is closed, at any time, everything here is ended: so nothing is left behind, whether the launcher dies,
cancels, or the connection breaks.
"""

import contextlib
import enum
import hashlib
import json
import os
import platform
import sys
from pathlib import Path

from training.contract.config.fields import StrictModel
from training.contract.errors import NodesError
from training.contract.identity.fingerprint import short
from training.contract.identity.software import library_versions, source_digest
from training.contract.protocol.job import Job
from training.launch.local import environment, torchrun
from training.launch.meeting import interface_of, meet
from training.launch.supervisor import CANCELLED, restore_signals, supervise

MARK = "pedigree-node: "


class Word(enum.StrEnum):
    READY = "ready"
    REFUSED = "refused"
    STARTED = "started"
    ENDED = "ended"


class Order(StrictModel):
    """The instructions for a node. `software`: that of the launching machine; `environment`: variables of its user.

    Variables that this machine sets itself, or the prefix by `env NAME=value`, take precedence.
    """

    node: int
    addresses: tuple[str, ...]
    port: int
    module: str
    job: Path
    sha256: str
    software: dict[str, str]
    environment: dict[str, str]


def software() -> dict[str, str]:
    """What has to be the same on all machines of a job: Python, libraries, and the source of this package."""
    return {**library_versions(), "the source of Pedigree": short(source_digest())}


def work() -> int:
    """Follow the instructions; the status is that of torchrun, or, like a shell's, that of a cancelled job.

    Standard error goes to standard output, since `podman exec` and `srun` do not keep the order of two streams.
    """
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    try:
        order = _receive()
        job = _read_job(order)
        interface = interface_of(order.addresses[order.node])
        _say(Word.READY, f"{platform.node()}, {interface} {order.addresses[order.node]}, {sys.executable}")
        if not sys.stdin.readline():
            return CANCELLED
        meet(order.node, order.addresses, order.port)
    except NodesError as error:
        _say(Word.REFUSED, str(error))
        return 1
    sockets = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }  # else NCCL takes eth10 for eth1, too
    given = {**sockets, **environment({**order.environment, **os.environ}, job.processes)}
    try:
        _say(Word.STARTED, f"{job.processes} processes of {given['OMP_NUM_THREADS']} threads")
        status = supervise(job.grace_seconds, [*_torchrun(order, job), "-m", order.module, str(order.job)], given)
    except SystemExit as asked:  # a signal, which a scheduler sends to all that runs on a machine
        status = int(asked.code or 0)
    _say(Word.ENDED, str(status))
    return status


def _receive() -> Order:
    """Raises NodesError if the prefix does not connect standard input, or the software differs."""
    if sys.stdin.isatty():
        raise NodesError("the command gives its process a terminal; let it connect plain pipes, as `ssh -T` does")
    line = sys.stdin.readline()
    if not line:
        raise NodesError(
            "the command does not connect standard input, as `ssh -T` (without -n) and `docker exec -i` do"
        )
    order, here = json.loads(line), software()
    others = [
        f"{name} {here.get(name, 'none')}, not {version}"
        for name, version in order["software"].items()
        if here.get(name) != version
    ]
    if others:
        raise NodesError(
            f"the software differs from that where the job was launched: {'; '.join(others)} ({sys.executable})"
        )
    return Order.model_validate(order)


def _read_job(order: Order) -> Job:
    """Raises NodesError if this machine does not see the same files."""
    share = "every machine must have the folder of PEDIGREE_HOME, and the models, at the same path"
    try:
        content = order.job.read_bytes()
    except OSError as error:
        raise NodesError(f"cannot read {order.job}: {error.strerror}; {share}") from error
    if hashlib.sha256(content).hexdigest() != order.sha256:
        raise NodesError(f"{order.job} is there, but it is not the same as where the job was launched; {share}")
    job = Job.model_validate_json(content)
    for name, given in job.inputs.items():
        if not given.folder.exists():
            raise NodesError(f"there is no {given.folder}, which holds {name}; {share}")
    return job


def _torchrun(order: Order, job: Job) -> list[str]:
    """With a static rendezvous, in which ranks follow the order of the nodes: node 0 has the first ones."""
    return [
        *torchrun(job),
        *("--nnodes", str(len(order.addresses)), "--node-rank", str(order.node), "--local-addr"),
        *(order.addresses[order.node], "--rdzv-backend", "static", "--rdzv-id", job.derivation.key),
        *("--rdzv-endpoint", f"[{order.addresses[0]}]:{order.port}"),
    ]


def _say(word: Word, detail: str) -> None:
    with contextlib.suppress(OSError):  # the conductor may be gone
        os.write(1, f"{MARK}{word} {' '.join(detail.split())}\n".encode())


if __name__ == "__main__":
    restore_signals()
    sys.exit(work())
