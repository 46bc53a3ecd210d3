"""Which process works on a run: written on the run as a tag, so that others can see whether it is still alive."""

import os
import platform
from pathlib import Path

import dagster as dg

PROCESS_TAG = "pedigree/process"


def sign(context: dg.AssetExecutionContext) -> None:
    """Tag the run of `context` with this process, unless the command that started it has done so already."""
    if PROCESS_TAG not in context.run.tags:
        context.instance.add_run_tags(context.run_id, {PROCESS_TAG: this_process()})


def this_process() -> str:
    """Host, process id, and which boot and tick the process began at, since ids are used again."""
    return f"{platform.node()} {os.getpid()} {_began(os.getpid())}"


def is_alive(process: str) -> bool:
    """Whether the process that `this_process` described is there; on another machine it counts as alive.

    Its beginning is compared in the kernel's ticks, not in the time of day: setting the clock moves that of every process.
    """
    host, pid, began = process.rsplit(" ", 2)
    if host != platform.node():
        return True
    try:
        return _began(int(pid)) == began
    except (FileNotFoundError, ProcessLookupError):
        return False


def _began(pid: int) -> str:
    """The boot of this machine and the tick of it at which the process began. Raises OSError if there is none."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # proc(5): the fields after `pid (name)`, and the name may hold spaces and parentheses; the 22nd of all is the start
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return f"{boot}+{fields[19]}"
