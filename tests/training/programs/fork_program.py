"""Run jobs on forked ranks. The parent has imported all modules, so a rank starts in a third of a second.

Each line of standard input is a request in JSON: `job`, the path of a job.json; `world`; `nodes`; and optionally `end`. The
answer is a line with the exit statuses of the ranks (negative: a signal). `end` ends rank `rank` (by default 0) early:

    {"step": n}         SIGKILL after the event of step n
    {"saved": n}        SIGKILL after the event of step n, as soon as a checkpoint exists
    {"touch": n}        SIGKILL before the n-th access (open, move or remove) in the folder of checkpoints
    {"size": n}         the kernel kills the rank when a file would grow over n bytes
    {"seconds": s}      the kernel kills the rank after s seconds
    {"stop": n}         SIGTERM after the event of step n
    {"full": n}         after the event of step n, no file can grow over 16 KiB, as on a full disk
    {"memory": n}       after the event of step n, allocate more memory than the address space
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from training import main
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import RENDEZVOUS, Job
from training.contract.store.artifact import JobResult
from training.job_context import JobContext
from training.jobs import policy


class EndingEvents(EventWriter):
    """Calls `end` after the event of a step."""

    def __init__(self, path: Path | None, step: int, end: Callable[[], None]) -> None:
        super().__init__(path, keep=True)
        self.step, self.end = step, end

    def emit(self, event: str, **fields: Any) -> None:
        super().emit(event, **fields)
        if event == "step" and fields["step"] == self.step:
            self.end()


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))


def exhaust_memory() -> None:
    torch.empty(1 << 60)


def send_signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def kill_after_save(job: Job) -> Callable[[], None]:
    def end() -> None:
        while not list(job.checkpoints.glob("*/step-????????")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    return end


def end_early(end: dict[str, Any]) -> Any:
    """Return the job function of a rank that ends early."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "size" in end:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (end["size"], end["size"]))
    if "seconds" in end:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, end["seconds"])
    if "touch" in end:
        sys.addaudithook(kill_at_access(end["touch"]))

    train = policy.run

    def run(context: JobContext[Any, Any]) -> JobResult:
        job = context.job
        ends = {
            "step": send_signal(signal.SIGKILL),
            "saved": kill_after_save(job),
            "stop": send_signal(signal.SIGTERM),
            "full": fill_the_disk,
            "memory": exhaust_memory,
        }
        for key in ends.keys() & end.keys():
            events = EndingEvents(job.events if context.group.is_main else None, end[key], ends[key])
            context = replace(context, events=events)
        return train(context)

    return run


def kill_at_access(count: int) -> Any:
    remaining = [count]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if any(isinstance(a, str | Path) and "checkpoints/" in str(a) for a in arguments):
            remaining[0] -= 1
            if not remaining[0]:
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
        policy.run = end_early(request["end"])
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
        if statuses[pid] < 0:  # the other ranks would wait long for it
            for other in set(ranks) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in ranks]


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()
