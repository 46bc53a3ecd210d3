"""The servers of `pedigree ui`, over one home: Dagster's web server, daemon and code server, and MLflow's server.

Dagster's server shows the graph, MLflow's the runs. Both listen on loopback and refuse requests of other sites' pages. The code
server listens on a socket in a folder of this user. `dagster dev` has no such checks.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from dagster._core.instance import InstanceRef
from dagster._serdes import serialize_value

from assets.views.pages import SERVED_VARIABLE
from model_registry.connection import PAGES_VARIABLE, is_server, note_address
from model_registry.registry import Registry
from model_registry.tracking import artifact_root
from workflows.servers.same_origin import ALLOWED_HOSTS_VARIABLE
from workflows.servers.server_processes import LOOPBACK, Processes, Server, serving, usable_port

# Dagster and uvicorn would search the working directory first. They get the root folder of our packages instead.
_SOURCE_ROOT = Path(__file__).parents[2]
CODE_LOCATION = "workflows.definitions"  # Dagster stores the states of schedules and sensors by this name
# MLflow compares the `Host` header by `fnmatch`, in which `[[]` is a bracket.
_LOOPBACK_PATTERNS = ("localhost", "localhost:*", "127.0.0.1", "127.0.0.1:*", "[::1]", "[[]::1]:*")


@dataclass(frozen=True)
class WebPages:
    """The addresses of Dagster's and MLflow's pages, and the processes behind them."""

    dagster: str
    mlflow: str
    processes: Processes


@contextmanager
def web_servers(
    home: Path,
    instance: InstanceRef,
    registry: Registry,
    ports: tuple[int, int],
    hosts: Sequence[str],
    report: Callable[[str], None],
) -> Iterator[WebPages]:
    """Run the servers over `home`; MLflow's only if runs are not tracked on another server.

    `ports` are the preferred ones of Dagster and MLflow. `hosts` are the names under which a proxy passes requests on.
    """
    port = usable_port(ports[0], report)
    servers: list[Server] = []
    environment = {ALLOWED_HOSTS_VARIABLE: ",".join(hosts), SERVED_VARIABLE: "yes"}
    pages = registry.tracking_uri
    if not is_server(registry.tracking_uri):
        servers.append(_mlflow_server(home, registry, usable_port(ports[1], report), hosts))
        # The address can be noted only beside a file, so pass it to the runs started by Dagster.
        environment[PAGES_VARIABLE] = pages = os.environ.get(PAGES_VARIABLE) or servers[0].address
    report("Starting the web servers; this takes up to half a minute.")
    with tempfile.TemporaryDirectory(prefix="pedigree-") as sockets:
        dagster = _dagster_servers(home, instance, port, Path(sockets), environment)
        with serving([*servers, *dagster], report) as processes:
            if servers:
                note_address(registry.tracking_uri, servers[0].address)
            yield WebPages(dagster[-1].address, pages, processes)


def _dagster_servers(
    home: Path, instance: InstanceRef, port: int, sockets: Path, environment: Mapping[str, str]
) -> list[Server]:
    """Return the code server, the daemon and the web server."""
    logs, socket, workspace = home / "dagster", sockets / "code", sockets / "workspace.yaml"
    location = {"socket": str(socket), "location_name": CODE_LOCATION}
    workspace.write_text(yaml.safe_dump({"load_from": [{"grpc_server": location}]}))
    code = [sys.executable, "-m", "dagster", "code-server", "start", "--module-name", CODE_LOCATION]
    code += ["--working-directory", str(_SOURCE_ROOT), "--socket", str(socket), "--location-name", CODE_LOCATION]
    code += ["--use-python-environment-entry-point", "--inject-env-vars-from-instance", "--log-level", "warning"]
    daemon = [sys.executable, "-m", "dagster._daemon", "run", "--workspace", str(workspace)]
    web = [sys.executable, "-m", "workflows.servers.dagster_app", str(port), str(workspace)]
    address = f"http://{LOOPBACK}:{port}"
    # Every user of the machine can see a command, and an instance may name a database with its password.
    of_code = {**environment, "DAGSTER_INSTANCE_REF": serialize_value(instance)}
    return [
        Server("Dagster's code server", code, "", f"unix:{socket}", logs / "code-server.log", of_code, restarts=True),
        Server("Dagster's daemon", daemon, "", "", logs / "daemon.log", environment, waits=True, restarts=True),
        Server(
            "Dagster's web server",
            web,
            address,
            f"{address}/server_info",
            logs / "webserver.log",
            environment,
            restarts=True,
        ),
    ]


def _mlflow_server(home: Path, registry: Registry, port: int, hosts: Sequence[str]) -> Server:
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "pedigree"]
    command += ["--default-artifact-root", artifact_root(home).as_uri(), "--no-serve-artifacts"]
    command += ["--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    command += ["--allowed-hosts", ",".join([*_LOOPBACK_PATTERNS, *hosts])]
    if hosts:
        origins = [f"{scheme}://{name}" for name in hosts for scheme in ("https", "http")]
        command += ["--cors-allowed-origins", ",".join(origins)]
    command += ["--uvicorn-opts", shlex.join(["--app-dir", str(_SOURCE_ROOT)])]
    address = f"http://{LOOPBACK}:{port}"
    # Every user of the machine can see a command, and a database's address may contain a password.
    environment = {"MLFLOW_BACKEND_STORE_URI": registry.tracking_uri, ALLOWED_HOSTS_VARIABLE: ",".join(hosts)}
    if not is_server(registry.uri):
        environment["MLFLOW_REGISTRY_STORE_URI"] = registry.uri
    log = home / "mlflow" / "server.log"
    return Server("MLflow's server", command, address, f"{address}/health", log, environment, restarts=True)
