"""The supervisor: a process between the launcher and a job's processes that leaves none of them behind.

    launcher ──pipe──> supervisor ──> torchrun ──> ranks

* The launcher dies or cancels: the pipe on standard input is closed; the supervisor ends all its descendants, SIGTERM first.
* The command ends, killed or not: the supervisor ends what is left of its descendants, and exits with its status (128 + n for
  signal n).
* The supervisor itself is killed: parent-death signals end the command, and then each rank.

It inherits the open file of the key's lock, and so does the command: the lock is free when the last of them is gone. It runs
in a session of its own, so Ctrl-C in a terminal reaches only the launcher, which then cancels.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from training.contract.protocol.job import SUPERVISOR
from training.contract.system.process import die_with_parent
from training.launch.process_tree import adopt_orphans, end_descendants

CANCELLED = 128 + signal.SIGTERM
_LOOK_SECONDS = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def supervise(grace: float, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` and return its exit status; CANCELLED if standard input is closed, or the launcher ends, first.

    Processes that are left then have `grace` seconds between SIGTERM and SIGKILL.
    """
    launcher, supervisor = os.getppid(), os.getpid()

    def bind() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        die_with_parent()
        if os.getppid() != supervisor:
            os._exit(CANCELLED)

    adopt_orphans()
    try:
        environment = {**environment, SUPERVISOR: str(supervisor)}
        # A signal waits while a process is forked: what its handler raises in a hook of fork, such as logging's, is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # The lock is the one open file that can be inherited, and it has to be.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, close_fds=False, preexec_fn=bind)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return _wait(child, launcher)
    finally:
        ignore_signals()
        end_descendants(grace)


def _wait(child: "subprocess.Popen[bytes]", launcher: int) -> int:
    ended = os.pidfd_open(child.pid)
    # A process that the launcher forked may keep the pipe open after the launcher's death, so that is checked too.
    while os.getppid() == launcher:
        ready, _, _ = select.select([sys.stdin, ended], [], [], _LOOK_SECONDS)
        if ended in ready:
            status = child.wait()
            return status if status >= 0 else 128 - status
        if ready:
            break
    return CANCELLED


def ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def restore_signals() -> None:
    """Handle signals that a shell ignores or blocks in a background job; the command starts with the defaults."""
    for number in _SIGNALS:
        signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _leave(number: int, _: FrameType | None) -> None:
    ignore_signals()  # a second signal must not interrupt what the first one begins
    sys.exit(128 + number)


if __name__ == "__main__":
    restore_signals()
    sys.exit(supervise(float(sys.argv[1]), sys.argv[2:], os.environ))
