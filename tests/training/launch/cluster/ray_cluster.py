"""A real cluster of Ray on this machine: a head and a second node, with ports, a token and files of their own."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from ray._private.authentication_test_utils import reset_auth_token_state, set_auth_mode, set_auth_token_path
from ray.job_submission import JobSubmissionClient

from training.launch.cluster.network import free_port

_HOST = "127.0.0.1"
_SECONDS = 90.0
_START = (sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={_HOST}", "--num-cpus=2", "--block")


@dataclass
class RayCluster:
    """`sockets`: a folder for Ray's files. `address`: of the Jobs API.

    `environment`: the variables by which a client may use the cluster.
    """

    folder: Path
    sockets: Path
    port: int
    dashboard: int
    environment: dict[str, str]

    @property
    def address(self) -> str:
        return f"http://{_HOST}:{self.dashboard}"

    @contextmanager
    def head(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Yield the head, which answers."""
        command = [
            *_START,
            "--head",
            f"--port={self.port}",
            "--include-dashboard=true",
            f"--dashboard-port={self.dashboard}",
        ]
        command += [f"--dashboard-agent-listen-port={free_port(_HOST)}", f"--temp-dir={self.sockets}"]
        with self._started(command, "head") as process:
            self._wait_for_answer()
            yield process

    @contextmanager
    def node(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Yield a second node."""
        command = [*_START, f"--address={_HOST}:{self.port}", f"--dashboard-agent-listen-port={free_port(_HOST)}"]
        with self._started(command, "node") as process:
            yield process

    @contextmanager
    def _started(self, command: list[str], name: str) -> Iterator["subprocess.Popen[bytes]"]:
        with (
            open(self.folder / f"{name}.log", "wb") as log,
            subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            ) as process,
        ):
            try:
                yield process
            finally:
                end(process)

    def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                JobSubmissionClient(self.address).list_jobs()
                return
            except (ConnectionError, RuntimeError):
                if time.monotonic() > deadline:
                    raise AssertionError((self.folder / "head.log").read_text()) from None
                time.sleep(0.5)


@contextmanager
def ray_cluster(folder: Path, variables: dict[str, str]) -> Iterator[RayCluster]:
    """Yield a cluster without nodes. `variables`: of the environment of its processes."""
    (token := folder / "token").write_text(secrets.token_hex(32))
    token.chmod(0o600)
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **own, **variables}
    authenticate(token)
    # The path of a socket has 107 bytes at most, and Ray adds 60 to this one.
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        yield RayCluster(folder, Path(sockets), free_port(_HOST), free_port(_HOST), environment)


def authenticate(token: Path) -> None:
    """Make this process a client with the token. Ray reads the variables when it is imported, which was before."""
    set_auth_mode("token")
    set_auth_token_path(None, token)
    reset_auth_token_state()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and everything below it, as a machine that loses its power."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    process.kill()
    for child in below:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(below, timeout=10)
    process.wait()
