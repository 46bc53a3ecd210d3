"""Files in a job's folder by which the driver and the nodes of Ray report: the placement, and the nodes that are at work.

A node's file is touched every few seconds, and removed when the last process of the job has ended there. So the next job can
wait for them, even if the head of Ray, which knew the nodes, is lost.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from training.contract.protocol.job import Job
from training.launch.engine import JobState, Phase

_SECONDS_BETWEEN_SIGNS, _SECONDS_UNTIL_LOST = 2.0, 30.0


def write_placement(job: Job, phase: Phase, detail: str, remedy: str = "") -> None:
    content = json.dumps({"phase": phase, "detail": detail, "remedy": remedy})
    _placement(job).with_suffix(".new").write_text(content, encoding="utf-8")
    _placement(job).with_suffix(".new").replace(_placement(job))


def read_placement(job: Job) -> JobState | None:
    """Return the state that the driver wrote; None before it has written."""
    try:
        return JobState(**json.loads(_placement(job).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def forget_placement(job: Job) -> None:
    _placement(job).unlink(missing_ok=True)


def alive_nodes(job: Job) -> list[str]:
    """Return the nodes on which processes of the job run. Times are compared on the file system of the job's folder."""
    folder = _nodes(job)
    if not folder.is_dir():
        return []
    (probe := folder / ".now").touch()
    now, alive = probe.stat().st_mtime, []
    for sign in folder.glob("node-*"):
        with contextlib.suppress(FileNotFoundError):
            if now - sign.stat().st_mtime < _SECONDS_UNTIL_LOST:
                alive.append(sign.read_text(encoding="utf-8"))
    return sorted(alive)


@contextlib.contextmanager
def sign_of_life(job: Job, node: int, name: str) -> Iterator[None]:
    """Keep the node's file fresh in the block, and remove it at the end."""
    _nodes(job).mkdir(exist_ok=True)
    (sign := _nodes(job) / f"node-{node}").write_text(name, encoding="utf-8")
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_SECONDS_BETWEEN_SIGNS):
            with contextlib.suppress(OSError):
                sign.touch()

    (thread := threading.Thread(target=touch, daemon=True)).start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sign.unlink(missing_ok=True)


def _placement(job: Job) -> Path:
    return job.folder / "placement.json"


def _nodes(job: Job) -> Path:
    return job.folder / "nodes"
