"""The store on a full disk, and shared by the users of a group."""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pytest
from safetensors.numpy import save_file

from training.contract.store.artifact import JobResult
from training.contract.store.manifest import MANIFEST, Derivation
from training.contract.store.store import Store
from training.contract.system.locks import is_held, try_lock

pytestmark = pytest.mark.slow

KIND, FINGERPRINT = "policy", "f" * 64
DERIVATION = Derivation(kind=KIND, code_version="1", inputs={}, settings={})

# Run in its own mount namespace: a filesystem of 1 MiB, filled to the last byte at the step `when`.
FULL_DISK = """
import os, subprocess, sys
from pathlib import Path
import numpy as np
from training.contract.errors import StoreError
from training.contract.store.manifest import Derivation
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.store import JobResult, Store

disk, when = Path(sys.argv[1]), sys.argv[2]
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], stderr=subprocess.PIPE).returncode:
    sys.exit(77)
store = Store(disk / "store")

def derivation(version):
    return Derivation(kind="policy", code_version=version, inputs={}, settings={})

def fill():
    with open(disk / "filler", "wb", buffering=0) as filler:
        for size in (65536, 4096, 1):
            try:
                while filler.write(b"0" * size):
                    pass
            except OSError:
                continue

def publish(version, digit, when=None):
    if when == "before staging":
        fill()
    with store.staging() as staging:
        if when == "while writing":
            fill()
        (staging / "weights").write_bytes(digit * 100_000)
        if when == "while publishing":
            fill()
        store.publish(staging, derivation(version), JobResult(digit.decode() * 64))

publish("0", b"e")
try:
    if when == "cache shard":
        fill()
        cache = LogprobCache(store, "a" * 64)
        cache.add(np.zeros((1000, 32), np.uint8), np.ones(1000, np.int32), np.zeros(1000, np.float32))
    else:
        publish("1", b"f", when)
    sys.exit("it was published on a full disk")
except StoreError as error:
    print(error)
assert store.find("policy", derivation("0").key).file("weights").read_bytes() == b"e" * 100_000
assert store.find("policy", derivation("1").key) is None and store.fingerprints("policy") == ["e" * 64]
os.unlink(disk / "filler")
assert list((store.root / "staging").iterdir()) == [], list((store.root / "staging").iterdir())
publish("1", b"f")
assert store.find("policy", derivation("1").key) is not None
"""


@pytest.mark.parametrize("when", ["before staging", "while writing", "while publishing", "cache shard"])
def test_write_on_full_disk_raises_with_path_and_free_bytes_and_keeps_the_store(tmp_path, when):
    """A real filesystem without free space. Mounting one needs a namespace, so CI must allow namespaces."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    cannot_mount = done.returncode == 77 or "unshare" in done.stderr
    if cannot_mount and os.environ.get("CI") != "true":
        pytest.skip("mounting a small filesystem is not permitted here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "store") in done.stdout and "No space left" in done.stdout
    assert done.stdout.endswith("[disk-full]\n")
    free = int(done.stdout.split(" bytes free")[0].rsplit("(", 1)[1].replace(",", ""))
    assert 0 <= free < 100_000


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o002, 0o664, 0o775), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_published_files_have_the_permissions_of_the_umask(tmp_path, mask, file, folder):
    """safetensors writes files of 0600, and `tempfile` creates folders of 0700; they are adjusted too."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o2770)  # setgid: new folders inherit the group
    with umask(mask):
        store = Store(tmp_path / "store")
        with store.staging() as staging:
            (staging / "part").mkdir(mode=0o700)
            save_file({"w": np.zeros(4)}, staging / "part" / "model.safetensors")
            assert (staging / "part" / "model.safetensors").stat().st_mode & 0o777 == 0o600
            published = store.publish(staging, DERIVATION, JobResult(FINGERPRINT))
    modes = {path.relative_to(store.root): path.stat().st_mode & 0o7777 for path in store.root.rglob("*")}
    assert {m for p, m in modes.items() if not (store.root / p).is_dir()} == {file}, modes
    assert {m for p, m in modes.items() if (store.root / p).is_dir()} == {0o2000 | folder}, modes
    assert set(published.manifest.files) == {"part/model.safetensors"} and (published.folder / MANIFEST).is_file()


def test_artifact_set_aside_is_readable_by_the_group(tmp_path):
    with umask(0o027):
        store = Store(tmp_path / "store")
        with store.staging() as staging:
            (staging / "weights").touch()
            store.publish(staging, DERIVATION, JobResult(FINGERPRINT))
        moved = store.set_aside(KIND, FINGERPRINT)
    assert {path.stat().st_mode & 0o777 for path in (moved, *moved.parents[:2])} == {0o750}


def test_staging_removes_folders_of_dead_processes_only(tmp_path):
    store = Store(tmp_path / "store")
    child = os.fork()
    if child == 0:
        with store.staging() as staging:
            (staging / "weights").write_bytes(b"half")
            os._exit(0)
    os.waitpid(child, 0)
    (dead,) = (path for path in (store.root / "staging").iterdir() if path.is_dir())
    (odd := store.root / "staging" / "odd.lock").mkdir()  # cannot be opened, like the lock of another user
    with store.staging() as first:
        assert not dead.exists()
        with store.staging() as second:
            assert first.is_dir() and second.is_dir()
    assert list((store.root / "staging").iterdir()) == [odd]


MAKER = """
import sys, time
from pathlib import Path
from training.contract.store.manifest import Derivation
from training.contract.store.store import JobResult, Store

store, how = Store(Path(sys.argv[1])), Derivation(kind="policy", code_version="1", inputs={}, settings={})
with store.lock(how.kind, how.key):
    if store.find(how.kind, how.key) is None:
        with store.staging() as staging:
            time.sleep(0.3)
            (staging / "weights").write_bytes(b"w")
            store.publish(staging, how, JobResult("f" * 64))
        print("published")
"""


def test_processes_with_the_lock_of_one_key_publish_once(tmp_path):
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [maker.communicate(timeout=60)[0] for maker in makers]
    assert sorted(outputs) == ["", "", "", "published\n"] and [maker.returncode for maker in makers] == [0] * 4
    assert Store(tmp_path / "store").find(KIND, DERIVATION.key) is not None


def test_staging_by_many_processes_at_once_removes_no_folder_in_use(tmp_path):
    store, children = Store(tmp_path / "store"), []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(40):
                    with store.staging() as staging:
                        (staging / "weights").write_bytes(b"w")
                        assert (staging / "weights").read_bytes() == b"w"
                os._exit(0)
            except BaseException:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    assert list((store.root / "staging").iterdir()) == []


def test_lock_of_one_key_under_two_kinds_is_two_locks(tmp_path):
    store = Store(tmp_path / "store")
    with store.lock("policy", "k") as one, store.lock("memo/rule", "k") as two:
        assert one.name != two.name
        with open(one.name, "rb") as reopened, pytest.raises(BlockingIOError):
            fcntl.flock(reopened, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_is_held_ignores_other_callers_of_is_held(tmp_path):
    store = Store(tmp_path / "store")
    with store.lock("policy", "k") as held:
        path = store.lock_file("policy", "k")
        assert held.name == str(path) and is_held(path)
    with open(path, "rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not is_held(path)


@pytest.mark.parametrize("created_again", [False, True])
def test_try_lock_returns_none_if_the_file_is_removed_before_it_is_locked(tmp_path, monkeypatch, created_again):
    """Another process removes it as abandoned; a third process may create it again."""
    path, flock = tmp_path / "staged.lock", fcntl.flock

    def lose(file: BinaryIO, operation: int) -> None:
        path.unlink()
        if created_again:
            path.touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lose)
    assert try_lock(path) is None
