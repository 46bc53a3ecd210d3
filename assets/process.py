"""Which process works on a run: written on the run as a tag, so that others can see whether it is still alive."""

import platform

import dagster as dg
import psutil

PROCESS_TAG = "pedigree/process"


def sign(context: dg.AssetExecutionContext) -> None:
    """Tag the run of `context` with this process, unless the command that started it has done so already."""
    if PROCESS_TAG not in context.run.tags:
        context.instance.add_run_tags(context.run_id, {PROCESS_TAG: this_process()})


def this_process() -> str:
    """Host, process id, and when the process began, since ids are used again."""
    process = psutil.Process()
    return f"{platform.node()} {process.pid} {process.create_time()}"


def is_alive(process: str) -> bool:
    """Whether the process that `this_process` described is there; on another machine it counts as alive."""
    host, pid, began = process.rsplit(" ", 2)
    if host != platform.node():
        return True
    try:
        return bool(psutil.Process(int(pid)).create_time() == float(began))
    except psutil.NoSuchProcess:
        return False
