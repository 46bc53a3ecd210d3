"""Durable and atomic writing: a file or folder has its old or its new content, whole, even after a power cut.

Everything made here has the permissions that the umask gives a new file or folder. Python's `tempfile` gives 0600 and
0700 instead, and a rename would keep these in a store that a group shares.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from training.contract.errors import StoreError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SQLITE_NO_ROOM = "database or disk is full"
_NOT_ALLOWED = (errno.EACCES, errno.EPERM)
SHARED_HOME_HINT = "what several users share needs a group, folders with its setgid bit, and umask 002 for everybody"


def write_durably(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Replace the content of `path` in one step.

    The bytes are first written in `scratch`, a folder on the same filesystem, by default that of `path`. Raises OSError,
    and then leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = (scratch or path.parent) / f".{path.name}-{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file and every name under `folder` survive a power cut."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def new_folder(parent: Path, prefix: str = "") -> Path:
    """A new, empty folder in `parent`, which is made if it is missing."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def apply_umask(folder: Path) -> None:
    """Give everything in `folder` at least the permissions the umask gives new files and folders.

    Some libraries write files of 0600 (safetensors does). The umask is read off a new folder, since asking for it
    means changing it for a moment, for all threads.
    """
    probe = new_folder(folder)
    folder_mode = probe.stat().st_mode & 0o777
    probe.rmdir()
    for path in [folder, *folder.rglob("*")]:
        wanted = folder_mode if path.is_dir() else folder_mode & 0o666
        path.chmod(path.stat().st_mode & 0o7777 | wanted)


def write_error(doing: str, place: Path, error: object) -> StoreError:
    """The error to raise where the operating system refuses a write to `place`."""
    message = f"cannot {doing} in {place} ({free_bytes(place):,} bytes free): {error}"
    if is_disk_full(message):
        message += "; make room and run again: what was finished is kept"
    elif any(os.strerror(number) in message for number in _NOT_ALLOWED):
        message += f"; {SHARED_HOME_HINT}"
    return StoreError(message)


def is_disk_full(message: str) -> bool:
    """Whether the message of an error reports a full disk or quota: libraries raise types other than OSError for it."""
    return any(words in message for words in (*map(os.strerror, _NO_ROOM), _SQLITE_NO_ROOM))


def make_group_writable(files: Iterable[Path], like: Path) -> None:
    """Give those of SQLite's `files` that this user owns at least the permissions of the file `like`.

    SQLite makes files of 0644 at most, whatever the umask; its journals get the permissions of their database.
    """
    wanted = like.stat().st_mode & 0o666
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # journals come and go
            found = path.stat()
            if found.st_uid == os.geteuid() and found.st_mode & wanted != wanted:
                path.chmod(found.st_mode & 0o7777 | wanted)


def free_bytes(path: Path) -> int:
    """The free bytes of the filesystem that holds `path`, or will hold it."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
