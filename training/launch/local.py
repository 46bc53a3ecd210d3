"""Jobs on this machine: a plain process, or torchrun with one process a rank, both below a supervisor.

A job of one process runs without torchrun, which would cost two seconds and change nothing. Ranks find each other through
a file in the job's folder and talk over the loopback interface only; torchrun's default, `--standalone`, lets any machine that
reaches this one connect to its store without authentication.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from training.contract.protocol.job import RENDEZVOUS, Job
from training.contract.system.cgroups import cores

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
_PYTHON = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",  # a folder named `training` where the command was started is not ours
}
# Set by another launcher, such as a scheduler in a container: only our own torchrun may make a process a rank.
_FOREIGN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", RENDEZVOUS}
_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "=lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class LocalHandle:
    """`rendezvous`: a folder that nobody needs once the job has ended."""

    def __init__(self, supervisor: "subprocess.Popen[bytes]", log: Path, rendezvous: Path):
        self._supervisor, self.log, self._rendezvous = supervisor, log, rendezvous

    def poll(self) -> int | None:
        return self._supervisor.poll()

    def cancel(self) -> None:
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._supervisor.wait()
        shutil.rmtree(self._rendezvous, ignore_errors=True)


class LocalLauncher:
    """`module` is what every process of a job runs, with the path of job.json as its argument."""

    def __init__(self, module: str = "training.main"):
        self._module = module

    def start(self, job: Job, lock: BinaryIO | None = None) -> LocalHandle:
        work = ["-m", self._module, str(job.path)]
        command = [sys.executable, *work]
        if job.processes > 1:
            command = [*torchrun(job), *_rendezvous_in(job.rendezvous), *work]
        supervisor = [sys.executable, "-m", "training.launch.supervisor", str(job.grace_seconds)]
        ours = {**_LOOPBACK, RENDEZVOUS: str(job.rendezvous / "ranks")}
        return start_process(job, [*supervisor, *command], {**environment(os.environ, job.processes), **ours}, lock)


def start_process(job: Job, command: list[str], environment: dict[str, str], lock: BinaryIO | None) -> LocalHandle:
    """Start a process that ends, with all its descendants, at the end of its standard input; all of them hold `lock`.

    The folder of the ranks' rendezvous is made anew: files of ranks that were killed would confuse the next ones.
    """
    shutil.rmtree(job.rendezvous, ignore_errors=True)
    if job.rendezvous.exists():  # torchrun makes folders of 0700 there: another user of the home cannot empty them
        job.rendezvous.rename(job.folder / f"rendezvous-{secrets.token_hex(8)}")
    job.rendezvous.mkdir(parents=True)
    with open(job.log, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[lock.fileno()] if lock else [],
            start_new_session=True,
        )
    return LocalHandle(process, job.log, job.rendezvous)


def torchrun(job: Job) -> list[str]:
    """The beginning of a command for the ranks of `job` here; the caller adds their rendezvous and what they run."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.processes)),
        *("--log-dir", str(job.rendezvous), "--shutdown-timeout", str(job.grace_seconds)),
    ]


def environment(given: Mapping[str, str], processes: int) -> dict[str, str]:
    """The environment `given`, and what a job's processes need; a user's own OMP_... settings stay.

    Idle threads sleep (PASSIVE): by default they spin, which made jobs that share a machine several times slower. Compiled code
    is kept in the user's own folder: torch takes one in /tmp by default, whoever has made it.
    """
    threads = max(1, cores() // processes)
    parallel = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    parallel["TOKENIZERS_PARALLELISM"] = "false" if processes > 1 else "true"
    home = given.get("HOME")
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{home}/.cache/torchinductor"} if home and os.access(home, os.W_OK) else {}
    own = {name: value for name, value in given.items() if name not in _FOREIGN}
    return {**parallel, **compiled, **own, **_QUIET, **_PYTHON}


def _rendezvous_in(folder: Path) -> list[str]:
    return [
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(folder / "torchrun")),
        *("--local-addr", "127.0.0.1"),
    ]
