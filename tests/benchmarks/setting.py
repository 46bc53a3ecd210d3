"""What both sides of a comparison share: the training's settings, the machine, and how cost is measured.

It imports neither the project nor the peer, so that neither pays for the other's libraries.
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

ROOT = Path(__file__).parents[2]
BATCH, BETA, RATE, CLIP, MAX_LENGTH = 8, 0.1, 1e-4, 1.0, 1024


def peak_mb() -> float:
    """The most memory this process has held. Not getrusage's: that is handed on by the process that started this one."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def cpu_seconds() -> float:
    """User and system time of this process, of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Failed(SystemExit):
    """A process did not end as it should, and why: whoever does not expect that ends with it."""


def run(module: str, *arguments: str, threads: int, seconds: float | None = None) -> Any:
    """The JSON on the last line of a module of this folder, run in a process of its own, of at most so many seconds.

    Raises Failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    # TRL refuses to train where it sees several GPUs, and a process of ours uses one.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "mlflow"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(command)} took more than {seconds} seconds") from late
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def machine(threads: int) -> str:
    """One line for the head of a table."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    load = os.getloadavg()[0]
    return (
        f"{cpu.partition(':')[2].strip() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{threads} thread{'s' * (threads > 1)} a process, Python {platform.python_version()}, {libraries}; "
        f"load before the start {load:.1f}"
    )


def table(rows: list[list[str]]) -> str:
    """Rows of text, the first of them the head, as Markdown with aligned columns."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]) + "\n"
