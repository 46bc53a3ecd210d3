"""A real Slurm on this machine: munged, slurmctld and two slurmd, with ports, keys and state of their own."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_SECONDS = 30.0
_CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
InactiveLimit=0
SlurmdTimeout=10
ReturnToService=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=cpu Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=9
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Path]:
    """Yield the configuration file (SLURM_CONF) of a running cluster of the nodes n1 and n2."""
    config = folder / "slurm.conf"
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    config.write_text(_CONFIG.format(folder=folder, user=getpass.getuser(), ports=[_free_port() for _ in range(3)]))
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/key"]
    munge += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
    with ExitStack() as running:
        running.enter_context(_daemon(munge, folder, config))
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        running.enter_context(_daemon(["slurmctld", "-D"], folder, config))
        for node in ("n1", "n2"):
            running.enter_context(_daemon(["slurmd", "-D", "-N", node], folder, config))
        _wait(lambda: _states(config) == ["idle", "idle"], folder)
        yield config


@contextmanager
def _daemon(command: list[str], folder: Path, config: Path) -> Iterator[None]:
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with (
        open(folder / f"{command[0]}-{command[-1]}.log".replace("/", "_"), "wb") as log,
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


def _states(config: Path) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%t"]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in folder.glob("*.log"))
            raise AssertionError(f"no cluster in {_SECONDS:.0f} s\n{logs}")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
