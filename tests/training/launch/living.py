"""Which processes of a job still live, and what it says first."""

import time
from pathlib import Path

from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import Job


def alive(pids: list[int]) -> list[int]:
    """Those of `pids` that still run; a dead process that nobody has waited for does not."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


def all_gone(pids: list[int]) -> bool:
    """Whether they end by themselves; in a minute, since a busy machine may take longer than they do."""
    deadline = time.monotonic() + 60
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


def first_event(job: Job) -> Event:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for event in read_events(job.events):
            return event
        time.sleep(0.05)
    raise AssertionError(f"no event within 120 seconds; the log says\n{job.log.read_text()}")
