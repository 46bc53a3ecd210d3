"""Servers as separate processes, ended with the command. `pedigree ui` runs two over the same home, on loopback.

Dagster's server shows the graph, MLflow's the runs.
"""

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
from training.contract.system.process import die_with_parent

LOOPBACK = "127.0.0.1"
# The working directory may contain files named like packages. So Python does not search it, and Dagster and uvicorn, which
# would both search it first, get the root folder of our packages instead.
_SOURCE_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for MLflow's jobs, unused here
}
UNPROXIED = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback behind a proxy is another machine
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Server:
    """A server and the address to probe it."""

    name: str
    command: list[str]
    address: str
    probe: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # the working directory, by default the current one
    ready_seconds: float = 180.0


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


def _dagster_server(home: Path, port: int) -> Server:
    command = [sys.executable, "-m", "dagster", "dev", "-m", "workflows.definitions"]
    command += ["--working-directory", str(_SOURCE_ROOT), "--host", LOOPBACK, "--port", str(port)]
    address = f"http://{LOOPBACK}:{port}"
    return Server("Dagster", command, address, f"{address}/server_info", home / "dagster" / "webserver.log")


def _mlflow_server(home: Path, registry: Registry, port: int) -> Server:
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--default-artifact-root", artifact_root(home).as_uri(), "--no-serve-artifacts"]
    command += ["--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", shlex.join(["--app-dir", str(_SOURCE_ROOT)])]
    address = f"http://{LOOPBACK}:{port}"
    # Every user of the machine can see a command, and a database's address may contain a password.
    stores = {"MLFLOW_BACKEND_STORE_URI": registry.tracking_uri}
    if not is_server(registry.uri):
        stores["MLFLOW_REGISTRY_STORE_URI"] = registry.uri
    return Server("MLflow", command, address, f"{address}/health", home / "mlflow" / "server.log", stores)


@contextmanager
def web_servers(
    home: Path, registry: Registry, port: int, mlflow_port: int, report: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Run the servers over `home`, only Dagster's if runs are tracked on a server. Yield Dagster's and MLflow's address."""
    servers = [_dagster_server(home, usable_port(port, report))]
    pages = registry.tracking_uri
    if not is_server(registry.tracking_uri):
        servers.append(_mlflow_server(home, registry, usable_port(mlflow_port, report)))
        # The address can be noted only beside a file, so pass it to the runs started by Dagster.
        pages = os.environ.get(PAGES_VARIABLE) or servers[1].address
        servers[0] = replace(servers[0], environment={PAGES_VARIABLE: pages})
    report("Starting the web servers; this takes about half a minute.")
    with serving(servers):
        if len(servers) > 1:
            note_address(registry.tracking_uri, servers[1].address)
        yield servers[0].address, pages


def usable_port(port: int, report: Callable[[str], None], host: str = LOOPBACK) -> int:
    """Return `free_port`, and report a change."""
    usable = free_port(port, host)
    if usable != port:
        report(f"Port {port} is not free; using {usable} instead.")
    return usable


@contextmanager
def serving(servers: Sequence[Server]) -> Iterator[None]:
    """Start the servers, wait until each answers, and at the end stop them with all their children.

    Meanwhile SIGTERM and SIGHUP act like Ctrl-C.
    """
    started: list[subprocess.Popen[bytes]] = []
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in _ENDING}
    try:
        started.extend(_start(server) for server in servers)
        for server, process in zip(servers, started, strict=True):
            _wait_until_ready(server, process)
        yield
    finally:
        for process in started:
            _stop(process)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


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
                f"{server.name}'s server ended with status {process.returncode}; its log is {server.log}",
                "server-ended",
            )
        try:
            with UNPROXIED.open(server.probe, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise PedigreeError(
        f"{server.name}'s server did not answer in {server.ready_seconds:.0f} s; its log is {server.log}",
        "server-timeout",
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server and its children, all of one session: first with SIGTERM, then with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
