"""Run a function in a forked child process with a limit of memory, for code that comes with data, such as chat templates.

If an allocation fails, parts of Python and of its libraries may silently go on with wrong results. So a process that came close
to its limit ends, and its result is not used.
"""

import gc
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TypeVar

from training.contract.system.process import die_with_parent

MEMORY_BYTES = 2 << 30  # beside the memory that the process has at its start
_RESERVE_BYTES = 256 << 20  # the largest single allocation that may fail without an error
_EXHAUSTED = 77  # the exit status
_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")

Result = TypeVar("Result")


class MemoryExceeded(Exception):
    """The child process needed more than `MEMORY_BYTES`."""


class MemoryLimit:
    """Limits the memory of this process, from now on, to `MEMORY_BYTES` more than it has. It needs Linux."""

    def __init__(self) -> None:
        pages = int(_STATM.read_text().split()[0])
        self._bytes = pages * resource.getpagesize() + MEMORY_BYTES
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            self._bytes = min(self._bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (self._bytes, most))

    def end_if_exhausted(self) -> None:
        """End this process if an allocation may have failed since the last call."""
        peak = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmPeak"))
        if int(peak.split()[1]) * 1024 > self._bytes - _RESERVE_BYTES:
            end_exhausted()


def end_exhausted() -> NoReturn:
    """End this process as one that needs too much memory."""
    os._exit(_EXHAUSTED)


def run_in_child(function: Callable[[], Result]) -> Result:
    """Return `function()`, run in a forked process, or raise its error.

    Raises MemoryExceeded if it needs more than `MEMORY_BYTES`, MemoryError if the system killed it.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run, args=(function, sender, os.getpid()))
    child.start()
    sender.close()
    try:
        outcome = receiver.recv()
    except EOFError:
        outcome = None
    finally:
        receiver.close()
        child.join()
    if outcome is None:
        raise _failure(child.exitcode)
    done, result = outcome
    if not done:
        raise result
    return result  # type: ignore[no-any-return]


def _run(function: Callable[[], Result], sender: Connection, parent: int) -> None:
    prepare_child(parent)
    limit = MemoryLimit()
    try:
        outcome: tuple[bool, object] = (True, function())
    except MemoryError:
        end_exhausted()
    except Exception as error:
        outcome = (False, error)
    limit.end_if_exhausted()
    sender.send(outcome)
    sender.close()


def prepare_child(parent: int) -> None:
    """Prepare a forked process: it ends with its parent, and tokenizers use one thread, as theirs were not forked."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a pool ends its processes by it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, too
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # collections then skip the parent's objects, and leave their memory shared


def _failure(exit_code: int | None) -> Exception:
    if exit_code in (_EXHAUSTED, -signal.SIGABRT):  # libraries in Rust and C++ abort if an allocation fails
        return MemoryExceeded(f"more than {MEMORY_BYTES >> 30} GiB of memory")
    if exit_code == -signal.SIGKILL:
        return MemoryError("a child process was killed, as the system does when memory runs out")
    return RuntimeError(f"a child process ended with status {exit_code}")
