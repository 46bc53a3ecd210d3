"""The two web servers: Dagster's for the graph, MLflow's for the runs, on loopback, both over the same home."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from model_registry.connection import PAGES_VARIABLE, is_server, note_address
from model_registry.registry import Registry
from model_registry.tracking import artifact_root
from training.contract.errors import PedigreeError
from training.contract.lifetime import die_with_parent

_HOST = "127.0.0.1"
# Where the command was started there may be files named like packages. So that is not where Python looks for these, nor do
# Dagster and uvicorn, which would both look there first: they are given the folder that holds our packages in its place.
_SOURCE_ROOT = Path(__file__).parent.parent
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for jobs of MLflow's own that nothing here asks for
}
_UNPROXIED = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's loopback is another machine's
_READY_SECONDS = 180.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class _Server:
    """A server and how to see that it answers."""

    name: str
    command: list[str]
    address: str
    probe: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def free_port(preferred: int) -> int:
    """`preferred` if nobody listens there, else one the system gives."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise PedigreeError(f"no port is free on {_HOST}")


def _dagster_server(home: Path, port: int) -> _Server:
    command = [sys.executable, "-m", "dagster", "dev", "-m", "workflows.definitions"]
    command += ["--working-directory", str(_SOURCE_ROOT), "--host", _HOST, "--port", str(port)]
    address = f"http://{_HOST}:{port}"
    return _Server("Dagster", command, address, f"{address}/server_info", home / "dagster" / "webserver.log")


def _mlflow_server(home: Path, registry: Registry, port: int) -> _Server:
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--default-artifact-root", artifact_root(home).as_uri(), "--no-serve-artifacts"]
    command += ["--host", _HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", shlex.join(["--app-dir", str(_SOURCE_ROOT)])]
    address = f"http://{_HOST}:{port}"
    # A command can be seen by every user of the machine, and the address of a database may hold a password.
    stores = {"MLFLOW_BACKEND_STORE_URI": registry.tracking_uri}
    if not is_server(registry.uri):
        stores["MLFLOW_REGISTRY_STORE_URI"] = registry.uri
    return _Server("MLflow", command, address, f"{address}/health", home / "mlflow" / "server.log", stores)


@contextmanager
def web_servers(
    home: Path, registry: Registry, port: int, mlflow_port: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Run the servers over `home`, Dagster's alone if runs are tracked on a server. Yields Dagster's and MLflow's address."""
    servers = [_dagster_server(home, _usable(port, tell))]
    pages = registry.tracking_uri
    if not is_server(registry.tracking_uri):
        servers.append(_mlflow_server(home, registry, _usable(mlflow_port, tell)))
        # Only beside a file can it be noted where its pages are: the runs that Dagster starts are told.
        pages = os.environ.get(PAGES_VARIABLE) or servers[1].address
        servers[0] = replace(servers[0], environment={PAGES_VARIABLE: pages})
    tell("Starting the web servers; this takes about half a minute.")
    with _serving(servers):
        if len(servers) > 1:
            note_address(registry.tracking_uri, servers[1].address)
        yield servers[0].address, pages


def _usable(port: int, tell: Callable[[str], None]) -> int:
    found = free_port(port)
    if found != port:
        tell(f"Port {port} is not free; using {found} instead.")
    return found


@contextmanager
def _serving(servers: Sequence[_Server]) -> Iterator[None]:
    """Start the servers, wait until each answers, and stop them at the end with everything they started."""
    started: list[subprocess.Popen[bytes]] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        started.extend(_start(server) for server in servers)
        for server, process in zip(servers, started, strict=True):
            _wait_until_ready(server, process)
        yield
    finally:
        for process in started:
            _stop(process)


def _start(server: _Server) -> "subprocess.Popen[bytes]":
    server.log.parent.mkdir(parents=True, exist_ok=True)
    with open(server.log, "ab") as log:
        return subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **server.environment},
            start_new_session=True,
            preexec_fn=_prepare_child,
        )


def _prepare_child() -> None:
    """A shell that starts us in the background has SIGINT ignored, and a child would inherit that; nor may it outlive us."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def _wait_until_ready(server: _Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PedigreeError(
                f"{server.name}'s server ended with status {process.returncode}; its log is {server.log}"
            )
        try:
            with _UNPROXIED.open(server.probe, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise PedigreeError(f"{server.name}'s server did not answer in {_READY_SECONDS:.0f} s; its log is {server.log}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server and its children, which share its session: politely first, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
