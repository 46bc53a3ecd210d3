"""End a process with its parent, on Linux."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send the signal `number` to this process when its parent thread ends. exec keeps this, fork does not.

    If the parent has already ended, no signal comes. So compare the parent's id after this call.
    """
    prctl(_PR_SET_PDEATHSIG, number)


def prctl(option: int, value: int) -> None:
    """Make the system call prctl with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")
