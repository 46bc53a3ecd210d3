"""The entry point of the command `pedigree`. The command itself is in `workflows.cli.main`."""

import os
import platform
import sys
from io import TextIOWrapper

from workflows.cli import main as cli


def main() -> None:
    check_linux()
    open_standard_streams()
    cli.main()


def check_linux() -> None:
    """Exit unless this is Linux: only there does the kernel end jobs with their launcher (contract/system/process.py)."""
    if sys.platform != "linux":
        sys.exit(
            f"error: Pedigree runs on Linux, and this is {platform.system()}: ending a job's processes needs Linux. Use a "
            "Linux container or virtual machine (on Windows WSL 2)"
        )


def open_standard_streams() -> None:
    """Reopen closed standard streams on /dev/null.

    Otherwise the next opened file, such as a database, gets one of their descriptors, and libraries print into it.
    """
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # the next file gets the lowest free descriptor
        if getattr(sys, name) is None:
            devnull = open(os.devnull, mode, encoding="utf-8")
            os.set_inheritable(devnull.fileno(), True)
            setattr(sys, name, devnull)
    if isinstance(sys.stdout, TextIOWrapper):  # escape unencodable characters, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
