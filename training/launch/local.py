"""Jobs on this machine: a plain process, or torchrun with one process a rank, both below a supervisor.

A job of one process runs without torchrun, which would cost two seconds and change nothing. Ranks find each other through
a file in the job's folder and talk over the loopback interface only; torchrun's default, `--standalone`, lets any machine that
reaches this one connect to its store without authentication.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from training.contract.job import RENDEZVOUS, Job

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
# Of another launcher (a scheduler sets them in containers): whoever is not started by our torchrun is alone.
_FOREIGN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class LocalHandle:
    def __init__(self, supervisor: "subprocess.Popen[bytes]", log: Path):
        self._supervisor, self.log = supervisor, log

    def poll(self) -> int | None:
        return self._supervisor.poll()

    def cancel(self) -> None:
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._supervisor.wait()


class LocalLauncher:
    """`module` is what every process of a job runs, with the path of job.json as its argument."""

    def __init__(self, module: str = "training.main"):
        self._module = module

    def start(self, job: Job, lock: BinaryIO | None = None) -> LocalHandle:
        processes = job.compute.processes_per_node if job.distributed else 1
        rendezvous = _empty_folder(job.folder / "rendezvous")
        work = ["-m", self._module, str(job.path)]
        command = (
            [*_torchrun(processes, rendezvous, job.grace_seconds), *work] if processes > 1 else [sys.executable, *work]
        )
        with open(job.log, "wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "training.launch.supervisor", str(job.grace_seconds), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(processes, rendezvous),
                pass_fds=[lock.fileno()] if lock else [],
                start_new_session=True,
            )
        return LocalHandle(supervisor, job.log)


def _torchrun(processes: int, rendezvous: Path, grace: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(processes)),
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(rendezvous / "torchrun")),
        *("--local-addr", "127.0.0.1", "--log-dir", str(rendezvous), "--shutdown-timeout", str(grace)),
    ]


def _environment(processes: int, rendezvous: Path) -> dict[str, str]:
    """This process's environment and what the job's processes need. What a user has set of OMP_... stays.

    Threads that have nothing to do sleep: by default they spin, which made jobs that share a machine several times slower.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    parallel = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    parallel["TOKENIZERS_PARALLELISM"] = "false" if processes > 1 else "true"
    ours = {**_QUIET, **_PYTHON, **_LOOPBACK, RENDEZVOUS: str(rendezvous / "ranks")}
    given = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {**parallel, **given, **ours}


def _empty_folder(folder: Path) -> Path:
    """Made new for every attempt: what ranks that were killed left in a rendezvous file would confuse the next ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
