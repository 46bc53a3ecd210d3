"""Make one fault in one process of a job. Python imports this module at its start, as its folder is in PYTHONPATH.

The variable FAULT is JSON:

    of        the asset whose job meets the fault, or `package` for the process that packages a model
    rank      the rank (0 by default)
    at        the point: `write`, `publish` or `checkpoint`, the first such file operation of the job; `read NAME`, before it
              opens a file whose path ends so
    reached   a file that gets the id of the process at the point
    do        `wait` until a signal comes, `memory` for an allocation that fails, or a shell command
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR
_PLACES = {"write": ("/staging/", "/.staging/"), "checkpoint": ("/checkpoints/",)}


def act(fault: dict[str, Any]) -> None:
    """Make the fault, once."""
    if Path(fault["reached"]).exists():
        return
    with open(fault["reached"], "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    match fault["do"].split():
        case ["wait"]:
            while True:
                time.sleep(0.05)
        case ["memory"]:
            bytearray(1 << 62)
        case _:
            subprocess.run(fault["do"], shell=True, check=True, env={"PATH": os.environ["PATH"]})


def watch(fault: dict[str, Any]) -> None:
    """Make the fault at its point in this process."""
    of, acting = fault["of"], [False]

    def is_point(event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open" and fault["at"].startswith("read "):
            return str(arguments[0]).endswith(fault["at"].removeprefix("read "))
        if event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & _WRITES:
            return any(part in arguments[0] for part in _PLACES.get(fault["at"], ()))
        if event == "os.rename" and fault["at"] == "publish":
            return f"/store/{of}/" in str(arguments[1])
        return False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename") and not acting[0] and is_point(event, arguments):
            acting[0] = True
            act(fault)
            acting[0] = False

    sys.addaudithook(hook)


def _is_meant(fault: dict[str, Any]) -> bool:
    command = sys.orig_argv
    if fault["of"] == "package":
        return any("package_model" in part for part in command)
    is_job = (
        "training.main" in command
        and "torch.distributed.run" not in command
        and "training.launch.supervisor" not in command
    )
    return is_job and f"/jobs/{fault['of']}-" in command[-1] and int(os.environ.get("RANK", 0)) == fault.get("rank", 0)


if "FAULT" in os.environ and _is_meant(_fault := json.loads(os.environ["FAULT"])):
    watch(_fault)
