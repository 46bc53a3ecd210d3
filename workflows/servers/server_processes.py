"""Servers as processes of their own: started together, watched, and ended with the command."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from training.contract.errors import PedigreeError
from training.contract.system.process import die_with_parent

LOOPBACK = "127.0.0.1"
UNPROXIED = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback behind a proxy is another machine
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # the working directory may contain files named like packages
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for MLflow's jobs, unused here
}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS = 15.0
_POLL_SECONDS = 1.0
_SHORTEST_LIFE = 60.0  # a server that ends sooner after a restart would end again


@dataclass(frozen=True)
class Server:
    """A server and the address to probe it: of a page, or, as `unix:PATH`, of a gRPC server; empty for no probe.

    `waits`: whether it starts only when all servers before it answer. `restarts`: whether it is started again if it ends.
    """

    name: str
    command: list[str]
    address: str
    probe: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # the working directory, by default the current one
    ready_seconds: float = 180.0
    waits: bool = False
    restarts: bool = False


class Processes:
    """The running processes of some servers."""

    def __init__(self, servers: Sequence[Server], report: Callable[[str], None]) -> None:
        self._servers, self._report = servers, report
        self._started: list[subprocess.Popen[bytes]] = []
        self._restarted: dict[int, float] = {}

    def start(self) -> None:
        """Start the servers in order, and wait until all answer. Raises PedigreeError."""
        ready = 0
        for server in self._servers:
            if server.waits:
                self._wait(ready)
                ready = len(self._started)
            self._started.append(_start(server))
        self._wait(ready)

    def watch(self) -> None:
        """Watch the servers until Ctrl-C. Raises PedigreeError if one ends that does not restart."""
        while True:
            for index, server in enumerate(self._servers):
                if self._started[index].poll() is not None:
                    self._restart(index, server)
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End the servers and their children: first with SIGTERM, then with SIGKILL."""
        for process in self._started:
            _signal_session(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._started:
            while _signal_session(process, 0) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
            _signal_session(process, signal.SIGKILL)
            process.wait()

    def _wait(self, begin: int) -> None:
        for server, process in zip(self._servers[begin:], self._started[begin:], strict=False):
            _wait_until_ready(server, process)

    def _restart(self, index: int, server: Server) -> None:
        ended = self._started[index]
        problem = f"{server.name} ended with status {ended.returncode}; its log is {server.log}"
        now = time.monotonic()
        if not server.restarts or now - self._restarted.get(index, -_SHORTEST_LIFE) < _SHORTEST_LIFE:
            raise PedigreeError(f"{problem}; start this command again", "server-ended")
        self._report(f"{problem}. It is started again.")
        _signal_session(ended, signal.SIGKILL)
        self._started[index], self._restarted[index] = _start(server), now
        _wait_until_ready(server, self._started[index])


@contextmanager
def serving(servers: Sequence[Server], report: Callable[[str], None]) -> Iterator[Processes]:
    """Start the servers, and at the end stop them with all their children. Meanwhile SIGTERM and SIGHUP act like Ctrl-C."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in _ENDING}
    processes = Processes(servers, report)
    try:
        processes.start()
        yield processes
    finally:
        processes.stop()
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def free_port(preferred: int, host: str = LOOPBACK) -> int:
    """Return `preferred` if it is free, else a port chosen by the system.

    Raises PedigreeError if `host` is not this machine.
    """
    failure: OSError | None = None
    for port in (preferred, 0):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                failure = error
                continue
            return int(probe.getsockname()[1])
    raise PedigreeError(
        f"no port is available on {host}: {failure}; name an address of this machine", "no-free-port"
    ) from failure


def usable_port(port: int, report: Callable[[str], None], host: str = LOOPBACK) -> int:
    """Return `free_port`, and report a change."""
    usable = free_port(port, host)
    if usable != port:
        report(f"Port {port} is not free; using {usable} instead.")
    return usable


def _start(server: Server) -> "subprocess.Popen[bytes]":
    server.log.parent.mkdir(parents=True, exist_ok=True)
    with open(server.log, "ab") as log:
        return subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=server.folder,
            env={**os.environ, **_ENVIRONMENT, **server.environment},
            start_new_session=True,
            preexec_fn=_prepare_child,
        )


def _prepare_child() -> None:
    """Reset signals, as a shell's background jobs and their children ignore SIGINT. End the child with its parent."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def _wait_until_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + server.ready_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PedigreeError(
                f"{server.name} ended with status {process.returncode}; its log is {server.log}",
                "server-ended",
            )
        if _answers(server.probe):
            return
        time.sleep(0.3)
    raise PedigreeError(
        f"{server.name} did not answer in {server.ready_seconds:.0f} s; its log is {server.log}",
        "server-timeout",
    )


def _answers(probe: str) -> bool:
    if not probe:
        return True
    try:
        if probe.startswith("unix:"):
            with grpc.insecure_channel(probe) as channel:
                HealthStub(channel).Check(HealthCheckRequest(), timeout=5)
        else:
            UNPROXIED.open(probe, timeout=5).close()
    except (OSError, grpc.RpcError):
        return False
    return True


def _signal_session(process: "subprocess.Popen[bytes]", number: int) -> bool:
    """Send a signal to a server and its children, all of one session. Return whether one of them is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
