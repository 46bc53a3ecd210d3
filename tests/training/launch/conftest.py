"""Jobs that do what a test asks, by the programs in `programs/`; and another machine, which is this one over ssh."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import training
from training.contract.config.recipe import Compute
from training.contract.protocol.job import Job

PROGRAMS = Path(__file__).parent / "programs"
# The programs, and the package that is tested.
PYTHONPATH = os.pathsep.join([str(PROGRAMS), str(Path(training.__file__).parents[1])])
_SSHD = "/usr/sbin/sshd"  # it starts itself again for each connection, which needs the whole path


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(act: str, ranks: int = 1, nodes: int = 1) -> Job:
        return Job(
            kind="policy",
            artifact="policy",
            code_version="1",
            inputs={},
            settings={"act": act},
            locations={},
            compute=Compute(processes_per_node=ranks, nodes=nodes, device="cpu", grace_seconds=1),
            recipe={},
            store=tmp_path / "store",
            folder=tmp_path / "job",
        )

    return make


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    return _free_port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words that run a command over ssh, with nothing of this environment but the path of the package.

    The server is a process of this user with keys of its own. It ends with the tests.
    """
    if not all(shutil.which(program) for program in (_SSHD, "ssh", "ssh-keygen")):
        pytest.fail("another machine is played by an ssh server: apt-get install -y openssh-client openssh-server")
    folder, port = tmp_path_factory.mktemp("sshd"), _free_port()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    known = f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}"
    (folder / "known").write_text(known)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's server locks its helper in; a reboot takes it away
    options = ["ListenAddress=127.0.0.1", f"Port={port}", f"HostKey={folder / 'host'}", "StrictModes=no"]
    options += [f"AuthorizedKeysFile={folder / 'authorized'}", "PidFile=none", "UsePAM=no", "PermitRootLogin=yes"]
    client = ["ssh", "-F", "none", "-T", "-p", str(port), "-i", str(folder / "user")]
    client += ["-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={folder / 'known'}", "127.0.0.1"]
    with subprocess.Popen(
        [_SSHD, "-D", "-e", "-f", "/dev/null", *(f"-o{o}" for o in options)], stderr=subprocess.PIPE
    ) as server:
        try:
            _wait_for_answer(client, server)
            yield [*client, "env", f"PYTHONPATH={PYTHONPATH}", "OMP_NUM_THREADS=1"]
        finally:
            server.terminate()


def _wait_for_answer(client: list[str], server: "subprocess.Popen[bytes]") -> None:
    for _ in range(100):
        answer = subprocess.run([*client, "true"], capture_output=True, text=True)
        if answer.returncode == 0:
            return
        time.sleep(0.05)
    server.terminate()
    _, said = server.communicate()
    pytest.fail(f"the ssh server for the tests does not let us in: {answer.stderr} It says: {said.decode()}")
