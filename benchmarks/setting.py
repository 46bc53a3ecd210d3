"""Code for both sides of a comparison: the training's settings, the machine, and the measurement of cost.

It imports neither the project nor the peer, so neither pays for the other's libraries.
"""

import json
import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BATCH, BETA, RATE, CLIP, MAX_LENGTH = 8, 0.1, 1e-4, 1.0, 1024


def peak_mb() -> float:
    """Return the peak memory of this process. getrusage's figure would include the parent process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def cpu_seconds() -> float:
    """Return user and system time of this process, of all its threads, and of its ended child processes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + children_seconds()


def children_seconds() -> float:
    """Return user and system time of the ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Failed(SystemExit):
    """A process ended badly. If nothing catches it, this process ends with its message."""


def run(module: str, *arguments: str, threads: int, seconds: float | None = None) -> Any:
    """Run a module of this folder in a process of its own, with a time limit. Return the JSON of its last line.

    Raises Failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    # TRL refuses to train if it sees several GPUs, and our process uses one.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "mlflow"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(command)} took more than {seconds} seconds") from late
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def machine(threads: int) -> str:
    """Return one line for the head of a table."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    load = os.getloadavg()[0]
    return (
        f"{cpu.partition(':')[2].strip() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{threads} thread{'s' * (threads > 1)} a process, Python {platform.python_version()}, {libraries}; "
        f"load before the start {load:.1f}"
    )


def table(rows: list[list[str]]) -> str:
    """Return rows of text, the first of them the head, as Markdown with aligned columns."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]) + "\n"
