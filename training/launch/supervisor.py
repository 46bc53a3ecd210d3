"""The supervisor: a process between the launcher and a job's processes that leaves none of them behind.

    launcher ──pipe──> supervisor ──> torchrun ──> ranks

* The launcher dies or cancels: the pipe on standard input reaches its end, and everything below is ended, SIGTERM first.
* The command ends, killed or not: what is left below it is ended, and its exit status is passed on (128 + n for signal n).
* The supervisor itself is killed: parent-death signals end the command, and each rank after it.

It inherits the file of the key's lock, and so does the command: whoever waits for that lock waits for the last of them.
It runs in a session of its own, so Ctrl-C in a terminal reaches only the launcher, which then cancels.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from training.contract.job import SUPERVISOR
from training.launch.processes import adopt_orphans, die_with_parent, end_descendants

CANCELLED = 128 + signal.SIGTERM
_LOOK_SECONDS = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def supervise(grace: float, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` and give its exit status; CANCELLED if standard input ended, or the launcher, before it did.

    What is left then has `grace` seconds after SIGTERM: whoever has nothing to save ends at once anyway.
    """
    launcher, supervisor = os.getppid(), os.getpid()

    def bind() -> None:
        die_with_parent()
        if os.getppid() != supervisor:
            os._exit(CANCELLED)

    adopt_orphans()
    try:
        environment = {**environment, SUPERVISOR: str(supervisor)}
        # Of the open files only the lock can be inherited, and it shall be.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, close_fds=False, preexec_fn=bind)
        return _wait(child, launcher)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end_descendants(grace)


def _wait(child: "subprocess.Popen[bytes]", launcher: int) -> int:
    ended = os.pidfd_open(child.pid)
    # A process forked by the launcher may hold the pipe open beyond its death, so its death is looked for as well.
    while os.getppid() == launcher:
        ready, _, _ = select.select([sys.stdin, ended], [], [], _LOOK_SECONDS)
        if ended in ready:
            status = child.wait()
            return status if status >= 0 else 128 - status
        if ready:
            break
    return CANCELLED


def restore_signals() -> None:
    """Take signals again where a shell's background job has them ignored or blocked; the command starts with defaults."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


if __name__ == "__main__":
    restore_signals()
    sys.exit(supervise(float(sys.argv[1]), sys.argv[2:], os.environ))
