"""Tests of unreadable files, also for root, who may read everything."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_privileges() -> Iterator[Path]:
    """Yield a folder that anybody may enter; within the block the process is an ordinary user."""
    with tempfile.TemporaryDirectory() as name:
        folder, user = Path(name), os.geteuid()
        folder.chmod(0o755)
        try:
            if user == 0:
                os.chown(folder, 65534, -1)
                os.seteuid(65534)
            yield folder
        finally:
            if user == 0:
                os.seteuid(0)
