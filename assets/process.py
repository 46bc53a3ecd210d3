"""Which process works on a run: written on the run as a tag, so that others can see whether it is still alive.

A process is known by a lock that it holds as long as it lives, as one that stages an artifact is. So process ids that are
used again, clocks, reboots, containers and other machines do not matter: whoever sees the file can try the lock.
"""

import functools
import os
import platform
from pathlib import Path

import dagster as dg

from training.contract.removal import is_held
from training.contract.staging import Claim, claim_folder, remove_abandoned

PROCESS_TAG = "pedigree/process"


def sign(context: dg.AssetExecutionContext, home: Path) -> None:
    """Tag the run of `context` with this process, unless the command that started it has done so already."""
    if PROCESS_TAG not in context.run.tags:
        context.instance.add_run_tags(context.run_id, {PROCESS_TAG: this_process(home)})


def this_process(home: Path) -> str:
    """Host and process id, for people, and the lock of this process among those at work in `home`."""
    return f"{platform.node()} {os.getpid()} {_claim(home / 'processes').lock.name}"


def is_alive(process: str, home: Path) -> bool:
    """Whether the process that `this_process` described is there; `home` may lie elsewhere by now, or be a copy."""
    lock = Path(process.split(" ", 2)[2])
    return is_held(lock if lock.parent.is_dir() else home / "processes" / lock.name)


@functools.cache
def _claim(place: Path) -> Claim:
    """Never given up, so the kernel lets go of its lock when this process ends."""
    place.mkdir(parents=True, exist_ok=True)
    remove_abandoned(place)
    return claim_folder(place)
