"""The processes of a job that still run, and its first event."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.contract.protocol.events import read_events
from training.contract.protocol.job import Job

AnyEvent = Mapping[str, Any]  # of a program of the tests, with fields of its own


def alive(pids: list[int]) -> list[int]:
    """Return the processes that still run. A zombie does not run."""
    running = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            running.append(pid)
    return running


def all_gone(pids: list[int]) -> bool:
    """Return whether all processes end within a minute. On a busy machine they end late."""
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


def first_event(job: Job) -> AnyEvent:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for event in read_events(job.events):
            return event
        time.sleep(0.05)
    raise AssertionError(f"no event within 120 seconds; the log:\n{job.log.read_text()}")
