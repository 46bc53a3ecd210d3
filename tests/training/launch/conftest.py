"""Jobs that run the programs in `programs/`, and a second machine: this one over ssh."""

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
# The programs and the tested package.
PYTHONPATH = os.pathsep.join([str(PROGRAMS), str(Path(training.__file__).parents[1])])
_SSHD = "/usr/sbin/sshd"  # sshd starts itself again for each connection, so it needs an absolute path


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
    """Return the arguments that run a command over ssh. It gets only PYTHONPATH and the threads of this environment.

    The server is a process of this user with its own keys. It ends with the tests.
    """
    if not all(shutil.which(program) for program in (_SSHD, "ssh", "ssh-keygen")):
        pytest.fail("these tests need an ssh server: apt-get install -y openssh-client openssh-server")
    folder, port = tmp_path_factory.mktemp("sshd"), _free_port()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    known = f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}"
    (folder / "known").write_text(known)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs this folder if root starts it; a reboot removes it
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
    _, output = server.communicate()
    pytest.fail(f"the ssh server of the tests refuses the login: {answer.stderr} Its output: {output.decode()}")
