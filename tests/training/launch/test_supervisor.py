"""Tests of the supervisor in its own process: no signal is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.contract.system.locks import is_held, locked

pytestmark = pytest.mark.slow

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
SIGNALLED_IN_A_FORK = f"""
import os, signal, sys
from training.launch.supervisor import restore_signals, supervise

restore_signals()
os.register_at_fork({{hook}}=lambda: os.kill(os.getpid(), signal.SIGTERM))
sys.exit(supervise(1.0, {SLEEP!r}, os.environ))
"""


@pytest.mark.parametrize("hook", ["before", "after_in_parent"])
def test_supervise_a_signal_during_fork_ends_the_command(hook: str):
    """Python ignores an exception in a hook of fork, such as the exit after a signal. The job would never end."""
    program = [sys.executable, "-P", "-c", SIGNALLED_IN_A_FORK.format(hook=hook)]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as supervisor:  # closing its input would end it too
        try:
            assert supervisor.wait(30) == 128 + signal.SIGTERM
        finally:
            supervisor.kill()


def test_supervise_a_second_signal_does_not_stop_the_cleanup():
    """The command ignores SIGTERM. The supervisor kills it after the grace period of one second."""
    stubborn = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)",
    ]
    program = [sys.executable, "-P", "-m", "training.launch.supervisor", "1", *stubborn]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        supervisor.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.stdout.read() == b"", "the command holds the pipe while it runs"
    assert supervisor.returncode == 128 + signal.SIGTERM


# Turns off the signal at the death of its parent. It stands for a process that ends slowly.
OUTLIVES = "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 0); print(os.getpid(), flush=True); time.sleep(600)"


def test_supervise_a_command_that_outlives_the_supervisor_holds_the_lock(tmp_path: Path):
    """A second writer waits until the last process of the first writer ends."""
    program = [sys.executable, "-P", "-m", "training.launch.supervisor", "1", sys.executable, "-c", OUTLIVES]
    held = tmp_path / "key.lock"
    with locked(held) as file:
        supervisor = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()], text=True
        )
    with supervisor:
        assert supervisor.stdout is not None
        command = int(supervisor.stdout.readline())
        supervisor.kill()
        supervisor.wait()
        assert is_held(held)
        os.kill(command, signal.SIGKILL)
        assert supervisor.stdout.read() == ""
    assert not is_held(held)
