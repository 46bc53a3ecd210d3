"""The supervisor: a process between the launcher and a job's processes. It ends all of them.

    launcher ──pipe──> supervisor ──> torchrun ──> ranks

* The launcher dies or cancels: the pipe on standard input is closed. The supervisor ends all its descendants, SIGTERM first.
* The command ends: the supervisor ends the remaining descendants, and exits with the command's status (128 + n for signal n).
* The supervisor is killed: parent-death signals end the command, and then each rank.

Supervisor and command inherit the open file of the key's lock: the lock is free when the last of them ends. The supervisor
runs in its own session, so Ctrl-C in a terminal reaches only the launcher. The launcher then cancels.
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
    """Run `command` and return its exit status, or CANCELLED if standard input is closed or the launcher ends first.

    Remaining processes get `grace` seconds between SIGTERM and SIGKILL.
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
        # Block signals during the fork: an exception of a handler in a fork hook, such as logging's, would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # The lock is the only inheritable open file, and must be inherited.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, close_fds=False, preexec_fn=bind)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return _wait(child, launcher)
    finally:
        ignore_signals()
        end_descendants(grace)


def _wait(child: "subprocess.Popen[bytes]", launcher: int) -> int:
    ended = os.pidfd_open(child.pid)
    # Check the parent too: another process forked by the launcher may keep the pipe open after the launcher's death.
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
    """Handle signals that a shell ignores or blocks in a background job. The command starts with the defaults."""
    for number in _SIGNALS:
        signal.signal(number, _exit_on_signal)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    ignore_signals()  # a second signal must not interrupt the shutdown
    sys.exit(128 + number)


if __name__ == "__main__":
    restore_signals()
    sys.exit(supervise(float(sys.argv[1]), sys.argv[2:], os.environ))
