"""Jobs on this machine: a plain process, or torchrun with one process per rank, both below a supervisor.

A job of one process runs without torchrun, which would only cost two seconds. Ranks meet through a file in the job's folder
and use only the loopback interface. With torchrun's default, `--standalone`, any machine in the network could connect to the
store without authentication.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import psutil

from training.contract.errors import JobFailed
from training.contract.protocol.job import RENDEZVOUS, Job
from training.contract.system.cgroups import cores
from training.launch.engine import JobState
from training.launch.process_tree import stopped_descendants

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
_PYTHON = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",  # do not import from a folder `training` in the working directory
}
# Variables of other launchers, such as a scheduler in a container. Only our torchrun may make a process a rank. torchrun reads
# its options from variables with the prefix, which Kubeflow Trainer sets.
_FOREIGN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", RENDEZVOUS}
_FOREIGN_PREFIX = "PET_"
_SUPERVISOR_SECONDS = 60.0  # between its processes' grace and its own end
_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "=lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class LocalHandle:
    """A job on this machine. `rendezvous`: a folder that is deleted after the job.

    A canceled job has `grace` seconds, and its supervisor some more.
    """

    def __init__(self, supervisor: "subprocess.Popen[bytes]", log: Path, rendezvous: Path, grace: float):
        self._supervisor, self.log, self._rendezvous = supervisor, log, rendezvous
        self._patience = grace + _SUPERVISOR_SECONDS

    def state(self) -> JobState:
        status = self._supervisor.poll()
        return JobState("running" if status is None else "ended", status=status)

    def stopped(self) -> list[int]:
        return stopped_descendants(self._supervisor.pid)

    def cancel(self) -> None:
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._supervisor.send_signal(signal.SIGCONT)  # a stopped supervisor would not see it
        try:
            self._supervisor.wait(self._patience)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # the kernel then kills its descendants
            self._supervisor.wait()
        shutil.rmtree(self._rendezvous, ignore_errors=True)

    def detach(self) -> None:
        self.cancel()


class LocalEngine:
    """Runs jobs on this machine. Each process runs `module` with the path of job.json as its argument."""

    def __init__(self, module: str = "training.main"):
        self._module = module

    def find(self, job: Job) -> None:
        """Return None: a job on this machine ends with the process that started it."""

    def submit(self, job: Job, lock: BinaryIO | None = None) -> LocalHandle:
        module_args = ["-m", self._module, str(job.path)]
        command = [sys.executable, *module_args]
        if job.processes > 1:
            _check_loopback()
            command = [*torchrun(job), *_rendezvous_options(job.rendezvous), *module_args]
        supervisor = [sys.executable, "-m", "training.launch.supervisor", str(job.grace_seconds)]
        network = {**_LOOPBACK, RENDEZVOUS: str(job.rendezvous / "ranks")}
        return _start_process(job, [*supervisor, *command], {**environment(os.environ, job.processes), **network}, lock)


def _start_process(job: Job, command: list[str], environment: dict[str, str], lock: BinaryIO | None) -> LocalHandle:
    """Start a process that ends, with all its descendants, when its standard input is closed. All of them hold `lock`.

    The rendezvous folder is created anew: files of killed ranks would break the next rendezvous.
    """
    shutil.rmtree(job.rendezvous, ignore_errors=True)
    if job.rendezvous.exists():  # torchrun makes folders with mode 0700: another user cannot empty them
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
    return LocalHandle(process, job.log, job.rendezvous, job.grace_seconds)


def _check_loopback() -> None:
    """Raise JobFailed if the interface `lo` is down, as in a new network namespace. Gloo's own message names an address."""
    loopback = psutil.net_if_stats().get("lo")
    if loopback is None or not loopback.isup:
        raise JobFailed(
            "the network interface `lo` is down, but the processes of a job connect over it: turn it on (`ip link set lo up`)",
            "loopback-down",
        )


def torchrun(job: Job) -> list[str]:
    """Return the first part of a torchrun command for `job`. The caller appends rendezvous options and the program."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.processes)),
        *("--log-dir", str(job.rendezvous), "--shutdown-timeout", str(job.grace_seconds)),
    ]


def environment(inherited: Mapping[str, str], processes: int) -> dict[str, str]:
    """Return the inherited environment with the settings of a job's processes. A user's OMP_... settings take precedence.

    Idle threads sleep (PASSIVE). By default they spin, and jobs on a shared machine were several times slower. The cache of
    compiled code is in the user's folder: torch's default is a folder in /tmp that another user may own.
    """
    threads = max(1, cores() // processes)
    parallel = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    parallel["TOKENIZERS_PARALLELISM"] = "false" if processes > 1 else "true"
    home = inherited.get("HOME")
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{home}/.cache/torchinductor"} if home and os.access(home, os.W_OK) else {}
    kept = {name: value for name, value in inherited.items() if not _is_foreign(name)}
    return {**parallel, **compiled, **kept, **_QUIET, **_PYTHON}


def _is_foreign(name: str) -> bool:
    return name in _FOREIGN or name.startswith(_FOREIGN_PREFIX)


def _rendezvous_options(folder: Path) -> list[str]:
    return [
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(folder / "torchrun")),
        *("--local-addr", "127.0.0.1"),
    ]
