"""A run of the small recipe that meets a fault, and the next run, which must give the undisturbed run's bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.workflows.homes import ATTRIBUTES, Home

PROGRAMS = Path(__file__).parent / "programs"
GRACE_SECONDS = 2
RECIPE: dict[str, Any] = {
    **ATTRIBUTES,
    "reference": {"model": "./base", "sft": {"epochs": 1, "batch_size": 16}},
    "evaluation": {"samples": 1, "max_new_tokens": 2},
    "compute": {**ATTRIBUTES["compute"], "grace_seconds": GRACE_SECONDS},
}
# What a home must lack so that the stage is done again: folders below it.
CACHES = {"raw_preferences": "store/pairs", "tokenized_pairs": "store/tokens", "reference_logprobs": "store/memo"}
STAGES = (
    "raw_preferences",
    "tokenization_spec",
    "tokenized_pairs",
    "reference_model",
    "reference_logprobs",
    "policy",
    "evaluation",
    "released_model",
)
RANKED = ("reference_model", "reference_logprobs", "policy", "evaluation")
_LONGEST_SECONDS = 120.0


@dataclass(frozen=True)
class Undisturbed:
    """The folder of the recipe, a home in which it was run, and the fingerprints of that run."""

    recipe: Path
    home: Home
    fingerprints: dict[str, str]

    def without(self, stage: str, place: Path) -> Home:
        """Return a copy of the home in which `stage` was never made."""
        subprocess.run(["cp", "--archive", self.home.path, place], check=True)
        gone = [f"store/{stage}", f"store/keys/{stage}", CACHES.get(stage, "jobs"), "jobs"]
        for folder in [*gone, "mlflow"] if stage == "released_model" else gone:
            shutil.rmtree(place / folder, ignore_errors=True)
        return Home(place)


@dataclass
class Command:
    """A running command."""

    host: "CommandHost"
    home: Home
    pid: int
    log: Path

    def wait(self) -> int:
        """Return the exit status; negative for a signal."""
        return self.host.ask({"wait": self.pid})

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this command's home that have not ended."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.pid == self.pid or process.environ().get("PEDIGREE_HOME") == str(self.home.path)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def seconds_until_nothing_is_left(self) -> float:
        started = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - started < _LONGEST_SECONDS, [process.cmdline() for process in left]
            time.sleep(0.02)
        return time.monotonic() - started

    def find(self, role: str) -> psutil.Process:
        """Return the `supervisor`, `torchrun`, or `rank N` of the job; `pedigree` is the command itself."""
        for process in self.processes():
            with suppress(psutil.Error):
                if _role(process, self.pid) == role:
                    return process
        raise AssertionError(f"no {role} among {[p.cmdline() for p in self.processes()]}")


def _role(process: psutil.Process, command: int) -> str:
    line = process.cmdline()
    if process.pid == command:
        return "pedigree"
    if "training.launch.supervisor" in line:
        return "supervisor"
    if "torch.distributed.run" in line:
        return "torchrun"
    return f"rank {process.environ().get('RANK', 0)}" if "training.main" in line else "other"


STARTED: list[Command] = []  # by the test that runs


def end_commands() -> None:
    """Kill the processes that a failed test has left. They would slow down the other tests."""
    for command in STARTED:
        for process in command.processes():
            with suppress(psutil.Error):
                process.kill()
    STARTED.clear()


@dataclass
class CommandHost:
    """Starts commands in forks of a process that has imported all modules."""

    process: "subprocess.Popen[str]"
    logs: Path
    _commands: int = field(default=0)

    def ask(self, request: dict[str, Any]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(
        self,
        home: Home,
        *arguments: str,
        fault: dict[str, Any] | None = None,
        around: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> Command:
        """Start `pedigree` with these arguments. With `around`, the fault is at a request to MLflow."""
        self._commands += 1
        log = self.logs / f"{self._commands}.log"
        variables = home.environment | {"PYTHONPATH": str(PROGRAMS)} | (environment or {})
        if fault and not around:
            variables["FAULT"] = json.dumps(fault)
        request = {"arguments": arguments, "environment": variables, "output": str(log)}
        if around:
            request |= {"around": around, "fault": fault}
        STARTED.append(command := Command(self, home, self.ask(request), log))
        return command


@contextmanager
def command_host(logs: Path, *prefix: str) -> Iterator[CommandHost]:
    """Yield a host with the outputs of its commands in `logs`. `prefix` is a command that runs it, such as `unshare`."""
    environment = {**os.environ, "PYTHONPATH": str(PROGRAMS), "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, str(PROGRAMS / "command_host.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield CommandHost(process, logs)
        assert process.stdin is not None
        process.stdin.close()


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true result of `condition`."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"no {what} in {_LONGEST_SECONDS:.0f} s")


def send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        process.send_signal(signal.Signals(number))


def check_next_run(host: CommandHost, home: Home, undisturbed: Undisturbed) -> None:
    """Run the recipe again: it must succeed, with the undisturbed run's artifacts, and leave no process."""
    again = host.start(home, "run", str(undisturbed.recipe), "--json")
    status = again.wait()
    assert status == 0, again.output
    check_fingerprints(again.output, undisturbed)
    assert again.seconds_until_nothing_is_left() < GRACE_SECONDS


def check_fingerprints(output: str, undisturbed: Undisturbed) -> None:
    """Check that a command with `--json` made, or found, the undisturbed run's artifacts."""
    start = output.index("\n{\n") if "\n{\n" in output else output.index("{")
    report = json.loads(output[start:])
    assert {asset["asset"]: asset["fingerprint"] for asset in report["assets"]} == undisturbed.fingerprints
