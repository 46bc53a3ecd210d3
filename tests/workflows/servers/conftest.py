"""The web servers of `pedigree ui` over a home in which a recipe was run. They start once for all tests of the group `ui`."""

import re
import signal
import subprocess

import pytest

from tests.workflows.homes import ATTRIBUTES, PEDIGREE, write_recipe
from workflows.servers.server_processes import free_port

WRONG = {**ATTRIBUTES, "training": {"epoch": 3}}


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """Return a project whose files are named like packages that the servers import, ours among them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("workflows", "assets", "training", "mlflow", "gql", "datasets", "yaml"):
        (folder / f"{name}.py").write_text("raise ImportError('the file of another project')")
    return folder


@pytest.fixture(scope="session")
def printed(materialized, small_recipe, elsewhere, tmp_path_factory):
    """Start `pedigree ui` with the small recipe and a folder of recipes, in another folder, on a machine with a proxy.

    An invalid recipe in the folder is reported first. Return the two printed addresses.
    """
    home, _ = materialized
    others = tmp_path_factory.mktemp("others")
    write_recipe(others / "wrong", WRONG)
    ports = ["--port", str(free_port(0)), "--mlflow-port", str(free_port(0))]
    process = subprocess.Popen(
        [PEDIGREE, "ui", str(small_recipe), str(others), *ports],
        cwd=elsewhere,
        env={
            **home.environment,
            "http_proxy": "http://127.0.0.1:9",
            "no_proxy": "",
        },  # a dead proxy: nothing listens at port 9
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        errors = [process.stderr.readline() for _ in range(2)]
        assert "wrong/defs.yaml:12: training.epoch:" in errors[0] and " wrong " in errors[1], errors
        lines = [process.stdout.readline() for _ in range(2)]
        addresses = re.findall(r"http://127\.0\.0\.1:\d+/\S*", "".join(lines))
        assert len(addresses) == 2, lines
        yield addresses
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.fixture(scope="session")
def servers(printed):
    """Return the addresses of the two servers."""
    return [re.match(r"http://[^/]+", address)[0] for address in printed]
