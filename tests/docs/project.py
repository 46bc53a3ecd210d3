"""Copy the project into a folder, and run the fences of a page there in their order."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.docs.fences import ROOT, Fence
from training.contract.config.variants import merged

_PARTS = ("assets", "mlflow", "training", "workflows", "pedigree.py", "pyproject.toml", "constraints.txt", "Makefile")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "base", "*_cache")
_BOXES = re.compile(r"[─-╿]")
_SERVER_SECONDS = 300
_DEMO = "make demo"
_PORTS = ("8000", "5001")  # the pages' ports, which may be in use here


def copy_project(folder: Path) -> Path:
    """Copy the project into `folder`, with a link to the environment of the tests. Return `folder`."""
    folder.mkdir(parents=True)
    for part in _PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, folder / part)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@dataclass
class Project:
    """A copy of the project, and a shell whose folder and variables last from one fence to the next.

    `demo` is a copy in which `make demo` was run, with its output: the command takes minutes, so it is run once for all pages.
    """

    folder: Path
    demo: "Project | None" = None
    output: str = ""
    ports: dict[str, str] = field(default_factory=lambda: {port: free_port() for port in _PORTS})
    servers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.folder.parent / "shell.sh"

    def environment(self) -> dict[str, str]:
        """Return the variables of a new shell, in which the copy's own modules are imported and output has 100 columns."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MLFLOW_", "PEDIGREE_", "COV_"))}
        path = f"{self.folder}{os.pathsep}{self.folder / 'mlflow'}"
        fixed = {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return {**kept, **fixed, "PYTHONPATH": path}

    def play(self, page: Iterable[Fence]) -> None:
        """Run the fences of a page, and compare their output with the `text` fences."""
        try:
            for fence in page:
                self.do(fence)
        finally:
            for server in self.servers:
                os.killpg(server.pid, signal.SIGINT)
                server.wait(60)

    def do(self, fence: Fence) -> None:
        """Run one fence, as its mark says."""
        if fence.mark == "skip":
            self.output = ""
        elif fence.mark == "save":
            (self.folder / fence.argument).write_text(fence.text, encoding="utf-8")
        elif fence.mark == "edit":
            edit(self.folder / fence.argument, fence.text)
        elif fence.mark == "serve":
            self.serve(fence)
        elif fence.language == "bash":
            self.output = self.run_bash(fence)
        elif fence.language == "python":
            self.output = self.shell(fence, f"python - <<'END_OF_FENCE'\n{fence.text}END_OF_FENCE\n")
        elif fence.language == "text":
            check_output(fence, self.output)

    def run_bash(self, fence: Fence) -> str:
        """Run the commands of a fence. For `make demo` in front, copy its inputs and its home, hard links included."""
        first, _, rest = fence.text.strip().partition("\n")
        if first != _DEMO or self.demo is None:
            return self.shell(fence, fence.text)
        for part in (".pedigree", "workflows/defs/demo/base"):
            subprocess.run(["cp", "--archive", self.demo.folder / part, self.folder / part], check=True)
        return self.shell(fence, rest) if rest else self.demo.output

    def with_ports(self, text: str) -> str:
        """Replace the ports of the pages by free ones."""
        for port, free in self.ports.items():
            text = text.replace(f":{port}/", f":{free}/").replace(f"--port {port}", f"--port {free}")
        return text

    def script(self, commands: str) -> list[str]:
        """Return the command line of a shell that goes on from the last one's folder and variables."""
        start = f". {self.state}" if self.state.exists() else f"cd {self.folder}"
        commands = self.with_ports(commands)
        return ["bash", "-e", "-c", f'{start}\n{commands}\n{{ export -p; echo "cd $PWD"; }} > {self.state}']

    def shell(self, fence: Fence, commands: str) -> str:
        """Run commands and return their output. Fail with the place of the fence if one fails."""
        done = subprocess.run(
            self.script(commands),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=500,
        )
        assert done.returncode == 0, f"{fence.place}: exit {done.returncode}\n{fence.text}\n{done.stdout[-4000:]}"
        return done.stdout

    def serve(self, fence: Fence) -> None:
        """Start the commands in a process group of their own, and wait until their output has the mark's text."""
        log = self.folder.parent / f"server-{len(self.servers)}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                self.script(fence.text),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.servers.append(process)
        deadline = time.monotonic() + _SERVER_SECONDS
        while fence.argument not in (output := log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, f"{fence.place}: {output[-4000:]}"
            time.sleep(0.2)
        self.output = output


def edit(recipe: Path, text: str) -> None:
    """Merge fields into the attributes of a recipe file."""
    content, change = yaml.safe_load(recipe.read_text()), yaml.safe_load(text)
    content["attributes"] = merged(content["attributes"], change.get("attributes", change))
    recipe.write_text(yaml.safe_dump(content, sort_keys=False))


def check_output(fence: Fence, output: str) -> None:
    """Check that each line of a `text` fence occurs in the output.

    A word with a digit fits any word. Spaces, line breaks and borders of tables do not count, and `...` fits any text.
    """
    found = plain(output)
    for line in fence.text.splitlines():
        for part in plain(line).split("..."):
            words = [r"\S+" if re.search(r"\d", word) else re.escape(word) for word in part.split()]
            assert re.search(" ".join(words), found), f"{fence.place}: {line!r} is not in the output:\n{output[-6000:]}"


def plain(text: str) -> str:
    return " ".join(_BOXES.sub(" ", text).split())
