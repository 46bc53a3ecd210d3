"""Run `pedigree` commands in forks of this process, which has imported all modules: a command alone spends seconds on that.

A request is a line of JSON on standard input:

    arguments, environment, output   the command, its variables, and the file for its output
    around, fault                    a method of MLflow's client, and a fault as in sitecustomize.py; `at`: `before` or `after`
    wait                             the id of a fork; the answer is its exit status
    shell                            a shell command; the answer is its exit status

The answer to the first kind is the id of the fork.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from typing import Any

import sitecustomize  # type: ignore[import-not-found]  # found in the folder of this program
from mlflow import MlflowClient

import workflows.definitions  # noqa: F401
from workflows.cli.main import main


def interpose(method: str, fault: dict[str, Any]) -> None:
    original = getattr(MlflowClient, method)

    def call(*arguments: Any, **options: Any) -> Any:
        if fault["at"] == "before":
            sitecustomize.act(fault)
        result = original(*arguments, **options)
        if fault["at"] == "after":
            sitecustomize.act(fault)
        return result

    setattr(MlflowClient, method, call)


def command(request: dict[str, Any]) -> None:
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    if around := request.get("around"):
        interpose(around, request["fault"])
    try:
        main(request["arguments"], prog_name="pedigree")
    finally:
        sys.stdout.flush()


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if pid := request.get("wait"):
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        elif text := request.get("shell"):
            answer = subprocess.run(text, shell=True).returncode
        elif not (answer := os.fork()):
            try:
                command(request)
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
