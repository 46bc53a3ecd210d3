"""The command `pedigree`, as it begins: what it does is in `workflows.cli.main`, whose imports take seconds.

Ctrl-C within them ends it without a word, since nothing has happened yet. Python's own handler would show the inside of the
library that is being imported.
"""

import os
import platform
import signal
import sys
from io import TextIOWrapper

from training.contract.system.imports import import_without_gc


def main() -> None:
    check_linux()
    open_standard_streams()
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if is_pythons:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    cli = import_without_gc("workflows.cli.main")
    if is_pythons:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def check_linux() -> None:
    """Exit where no job could be started: that none outlives its launcher is the kernel's doing (contract/lifetime.py)."""
    if sys.platform != "linux":
        sys.exit(
            f"error: Pedigree runs on Linux, and this is {platform.system()}: a job's processes are ended by means that only "
            "Linux has. In a Linux container or virtual machine (on Windows WSL 2) it runs here too"
        )


def open_standard_streams() -> None:
    """Have standard streams that take everything: those that a caller has closed lead nowhere.

    Else the next file that is opened, a database say, has the number of one of them, and a library prints into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the lowest number that is free is the next
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
    if isinstance(sys.stdout, TextIOWrapper):  # what it has no letter for is escaped, as it is in stderr
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
