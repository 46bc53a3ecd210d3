"""How long a process lives: not longer than its parent, on Linux."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `number` when the thread that forked it ends. Kept by exec, not by fork.

    If the parent is gone already, no signal comes: compare it with the expected one after this call.
    """
    prctl(_PR_SET_PDEATHSIG, number)


def prctl(option: int, value: int) -> None:
    """The system call of this name, with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")
