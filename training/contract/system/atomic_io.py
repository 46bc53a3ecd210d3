"""Durable and atomic writing: a file has its old or its new content, even after a power cut.

New files and folders get the permissions of the umask. Python's `tempfile` gives 0600 and 0700, and a rename would keep these
in a store shared by a group.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from training.contract.errors import StoreError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_SQLITE_DISK_FULL = "database or disk is full"
_NOT_PERMITTED = (errno.EACCES, errno.EPERM)
READ_ONLY_HINT = (
    "the kernel makes a file system read-only after an error of the disk (see `dmesg`): run again once it can be written, "
    "finished work is kept"
)
SHARED_HOME_HINT = (
    "files shared by several users need a group, folders with its setgid bit, and umask 002 for everybody"
)


def write_durably(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Replace the content of `path` in one step. Raises OSError, and then leaves no files behind.

    The bytes are first written to a temporary file in `scratch`, by default the folder of `path`. `scratch` must be on the
    same filesystem.
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
    """Create an empty folder with a random name in `parent`; create `parent` if it is missing."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def apply_umask(folder: Path) -> None:
    """Give everything in `folder` at least the permissions of new files and folders.

    Some libraries, such as safetensors, write files of 0600. A new folder shows the umask: reading it with `os.umask` would
    change it for a moment, for all threads.
    """
    probe = new_folder(folder)
    folder_mode = probe.stat().st_mode & 0o777
    probe.rmdir()
    for path in [folder, *folder.rglob("*")]:
        minimum = folder_mode if path.is_dir() else folder_mode & 0o666
        path.chmod(path.stat().st_mode & 0o7777 | minimum)


def write_error(action: str, path: Path, error: object) -> StoreError:
    """Return the error for a failed write to `path`, such as `write_error("save the table", folder, error)`."""
    message = f"cannot {action} in {path} ({free_bytes(path):,} bytes free): {error}"
    if is_disk_full(message):
        return StoreError(f"{message}; make room and run again: finished work is kept", "disk-full")
    if os.strerror(errno.EROFS) in message:
        return StoreError(f"{message}; {READ_ONLY_HINT}", "read-only")
    if any(os.strerror(number) in message for number in _NOT_PERMITTED):
        return StoreError(f"{message}; {SHARED_HOME_HINT}", "not-permitted")
    return StoreError(message, "cannot-write")


def is_disk_full(message: str) -> bool:
    """Return whether an error's message reports a full disk or quota. Libraries raise types other than OSError for it."""
    return any(text in message for text in (*map(os.strerror, _DISK_FULL), _SQLITE_DISK_FULL))


def make_group_writable(files: Iterable[Path], like: Path) -> None:
    """Give this user's SQLite `files` at least the permissions of the file `like`.

    SQLite creates databases with 0644 at most, even under umask 002; its journals get the permissions of their database.
    """
    minimum = like.stat().st_mode & 0o666
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # SQLite removes journals at any time
            status = path.stat()
            if status.st_uid == os.geteuid() and status.st_mode & minimum != minimum:
                path.chmod(status.st_mode & 0o7777 | minimum)


def free_bytes(path: Path) -> int:
    """Return the free bytes of the filesystem of `path`, which need not exist."""
    return shutil.disk_usage(_existing(path)).free


def is_read_only(path: Path) -> bool:
    """Return whether the filesystem of `path`, which need not exist, is mounted read-only."""
    return bool(os.statvfs(_existing(path)).f_flag & os.ST_RDONLY)


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
