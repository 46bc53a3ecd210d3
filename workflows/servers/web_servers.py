"""Servers as processes of their own, which end with the command. Two are those of `pedigree ui`, over the same home.

Dagster's is for the graph, MLflow's for the runs, both on loopback.
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
# Where the command was started there may be files named like packages. So that is not where Python looks for these, nor do
# Dagster and uvicorn, which would both look there first: they are given the folder that holds our packages in its place.
_SOURCE_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for jobs of MLflow's own that nothing here asks for
}
UNPROXIED = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's loopback is another machine's
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Server:
    """A server and how to see that it answers."""

    name: str
    command: list[str]
    address: str
    probe: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None  # where it is started, by default right here
    ready_seconds: float = 180.0


def free_port(preferred: int, host: str = LOOPBACK) -> int:
    """`preferred` if nobody listens there, else one the system gives. Raises PedigreeError if `host` is not this machine."""
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
    raise PedigreeError(f"no port can be had on {host}: {failure}; name an address of this machine") from failure


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
    # A command can be seen by every user of the machine, and the address of a database may hold a password.
    stores = {"MLFLOW_BACKEND_STORE_URI": registry.tracking_uri}
    if not is_server(registry.uri):
        stores["MLFLOW_REGISTRY_STORE_URI"] = registry.uri
    return Server("MLflow", command, address, f"{address}/health", home / "mlflow" / "server.log", stores)


@contextmanager
def web_servers(
    home: Path, registry: Registry, port: int, mlflow_port: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Run the servers over `home`, Dagster's alone if runs are tracked on a server. Yields Dagster's and MLflow's address."""
    servers = [_dagster_server(home, usable_port(port, tell))]
    pages = registry.tracking_uri
    if not is_server(registry.tracking_uri):
        servers.append(_mlflow_server(home, registry, usable_port(mlflow_port, tell)))
        # Only beside a file can it be noted where its pages are: the runs that Dagster starts are told.
        pages = os.environ.get(PAGES_VARIABLE) or servers[1].address
        servers[0] = replace(servers[0], environment={PAGES_VARIABLE: pages})
    tell("Starting the web servers; this takes about half a minute.")
    with serving(servers):
        if len(servers) > 1:
            note_address(registry.tracking_uri, servers[1].address)
        yield servers[0].address, pages


def usable_port(port: int, tell: Callable[[str], None], host: str = LOOPBACK) -> int:
    """`free_port`, and tell whoever asked for another one."""
    found = free_port(port, host)
    if found != port:
        tell(f"Port {port} is not free; using {found} instead.")
    return found


@contextmanager
def serving(servers: Sequence[Server]) -> Iterator[None]:
    """Start the servers, wait until each answers, and stop them at the end with everything they started.

    Meanwhile SIGTERM and SIGHUP are what Ctrl-C is.
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
    """A shell that starts us in the background has SIGINT ignored, and a child would inherit that; nor may it outlive us."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def _wait_until_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + server.ready_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PedigreeError(
                f"{server.name}'s server ended with status {process.returncode}; its log is {server.log}"
            )
        try:
            with UNPROXIED.open(server.probe, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise PedigreeError(
        f"{server.name}'s server did not answer in {server.ready_seconds:.0f} s; its log is {server.log}"
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server and its children, which share its session: politely first, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
