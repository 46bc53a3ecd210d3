"""Starts jobs by forking: a process that has imported everything forks each rank, which so costs a third of a second.

Each line of standard input is a request, as JSON: `job`, the path of a job.json; `world` and `nodes`; and perhaps `end`, how
the rank number `rank`, by default 0, ends before its time. Each is answered by a line with the exit statuses of the ranks
(negative: a signal).

    {"step": n}         SIGKILL as soon as step n is told
    {"saved": n}        SIGKILL as soon as step n is told and there is a checkpoint, which is waited for
    {"touch": n}        SIGKILL before the n-th time that something in the folder of checkpoints is opened, moved or removed
    {"size": n}         the kernel kills it when a file is to grow beyond n bytes
    {"seconds": s}      the kernel kills it after so long
    {"stop": n}         SIGTERM as soon as step n is told
    {"full": n}         no file can grow beyond 16 KiB, as if the disk were full, as soon as step n is told
    {"memory": n}       asks for more memory than there are addresses, as soon as step n is told
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training import main
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import RENDEZVOUS, Job
from training.contract.store.store import JobResult
from training.distributed import Group
from training.jobs import policy


class EndingEvents(EventWriter):
    """Does something once a step is told."""

    def __init__(self, path: Path | None, step: int, end: Callable[[], None]) -> None:
        super().__init__(path, keep=True)
        self.step, self.end = step, end

    def emit(self, event: str, **fields: Any) -> None:
        super().emit(event, **fields)
        if event == "step" and fields["step"] == self.step:
            self.end()


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))


def ask_for_memory() -> None:
    torch.empty(1 << 60)


def sending(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def killing_once_saved(job: Job) -> Callable[[], None]:
    def end() -> None:
        while not list(job.checkpoints.glob("*/step-????????")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    return end


def ended_early(end: dict[str, Any]) -> Any:
    """The work of a rank that shall end before its time."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "size" in end:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (end["size"], end["size"]))
    if "seconds" in end:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, end["seconds"])
    if "touch" in end:
        sys.addaudithook(killing_after(end["touch"]))

    train = policy.run

    def run(job: Job, group: Group, events: EventWriter) -> JobResult:
        ends = {
            "step": sending(signal.SIGKILL),
            "saved": killing_once_saved(job),
            "stop": sending(signal.SIGTERM),
            "full": fill_the_disk,
            "memory": ask_for_memory,
        }
        for key in ends.keys() & end.keys():
            events = EndingEvents(job.events if group.is_main else None, end[key], ends[key])
        return train(job, group, events)

    return run


def killing_after(count: int) -> Any:
    left = [count]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if any(isinstance(a, str | Path) and "checkpoints/" in str(a) for a in arguments):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def rank(request: dict[str, Any], number: int, rendezvous: Path) -> None:
    job = Job.read(Path(request["job"]))
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = request["world"]
    if world > 1:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), RENDEZVOUS: str(rendezvous)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world // request["nodes"]), "GLOO_SOCKET_IFNAME": "lo"}
    if request["end"] and number == request["end"].get("rank", 0):
        policy.run = ended_early(request["end"])
    os._exit(main.main(Path(request["job"])))


def serve(request: dict[str, Any]) -> list[int]:
    rendezvous = Path(request["job"]).with_name(f"rendezvous-{time.monotonic_ns()}")
    ranks = []
    for number in range(request["world"]):
        pid = os.fork()
        if not pid:
            try:
                rank(request, number, rendezvous)
            finally:
                os._exit(70)
        ranks.append(pid)
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        pid, status = os.wait()
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if statuses[pid] < 0:  # whoever waits for it would wait long
            for other in set(ranks) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in ranks]


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()
