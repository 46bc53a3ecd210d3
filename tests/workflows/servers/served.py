"""`pedigree ui` as a process, for tests that open its pages."""

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.workflows.homes import PEDIGREE
from workflows.servers.server_processes import free_port


@dataclass(frozen=True)
class Served:
    """The printed addresses: Dagster's graph of the recipe, and MLflow's page of its runs or of all experiments."""

    graph: str
    experiments: str

    @property
    def dagster(self) -> str:
        """The address of Dagster's server."""
        return self.graph.partition("/locations/")[0]

    @property
    def mlflow(self) -> str:
        """The address of MLflow's server."""
        return self.experiments.partition("/#/")[0]


@contextmanager
def served_pages(home: Path, recipe: Path, environment: Mapping[str, str]) -> Iterator[Served]:
    """Yield the pages of `recipe` over `home`. End the servers after the block as by Ctrl-C."""
    ports = ["--port", str(free_port(0)), "--mlflow-port", str(free_port(0))]
    process = subprocess.Popen(
        [PEDIGREE, "ui", str(recipe), *ports],
        env={**environment, "PEDIGREE_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        found: list[str] = []
        while len(found) < 2 and process.poll() is None:
            found += re.findall(r"http://127\.0\.0\.1:\d+\S*", process.stdout.readline())
        assert len(found) == 2, process.returncode
        yield Served(*found)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
