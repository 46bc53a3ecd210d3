"""The store on a disk that is really full, and shared by the users of a group."""

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

from training.contract.store.manifest import MANIFEST, Derivation
from training.contract.store.store import JobResult, Store
from training.contract.system.locks import is_held, try_lock

KIND, FINGERPRINT = "policy", "f" * 64
DERIVATION = Derivation(kind=KIND, code_version="1", inputs={}, settings={})

# Run in a mount namespace of its own: a filesystem of 1 MiB, filled to the last byte at the place that is named.
FULL_DISK = """
import os, subprocess, sys
from pathlib import Path
import numpy as np
from training.contract.errors import StoreError
from training.contract.store.manifest import Derivation
from training.contract.store.logprob_cache import Memo
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
    if when == "memo":
        fill()
        Memo(store, "a" * 64).add(np.zeros((1000, 32), np.uint8), np.ones(1000, np.int32), np.zeros(1000, np.float32))
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


@pytest.mark.parametrize("when", ["before staging", "while writing", "while publishing", "memo"])
def test_a_full_disk_is_told_with_place_and_room_and_harms_nothing(tmp_path, when):
    """A real filesystem without room. Mounting one takes a namespace of one's own, which CI must allow."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL_DISK, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refused = done.returncode == 77 or "unshare" in done.stderr
    if refused and os.environ.get("CI") != "true":
        pytest.skip("mounting a small filesystem is not permitted here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "store") in done.stdout and "No space left" in done.stdout
    free = int(done.stdout.split(" bytes free")[0].rsplit("(", 1)[1].replace(",", ""))
    assert 0 <= free < 100_000


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o002, 0o664, 0o775), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_permissions_are_those_of_the_umask(tmp_path, mask, file, folder):
    """Also those of files a library wrote as its owner's alone, as safetensors does, in folders `tempfile` made."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o2770)  # folders in it are of its group, and stay so
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


def test_an_artifact_that_is_set_aside_can_be_read_by_the_group(tmp_path):
    with umask(0o027):
        store = Store(tmp_path / "store")
        with store.staging() as staging:
            (staging / "weights").touch()
            store.publish(staging, DERIVATION, JobResult(FINGERPRINT))
        place = store.set_aside(KIND, FINGERPRINT)
    assert {path.stat().st_mode & 0o777 for path in (place, *place.parents[:2])} == {0o750}


def test_staging_of_the_dead_goes_and_that_of_the_living_stays(tmp_path):
    store = Store(tmp_path / "store")
    child = os.fork()
    if child == 0:
        with store.staging() as staging:
            (staging / "weights").write_bytes(b"half")
            os._exit(0)
    os.waitpid(child, 0)
    (dead,) = (path for path in (store.root / "staging").iterdir() if path.is_dir())
    (odd := store.root / "staging" / "odd.lock").mkdir()  # as little to be opened as the lock of another user
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
        print("made it")
"""


def test_processes_that_make_one_key_at_once_make_it_once(tmp_path):
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [maker.communicate(timeout=60)[0] for maker in makers]
    assert sorted(said) == ["", "", "", "made it\n"] and [maker.returncode for maker in makers] == [0] * 4
    assert Store(tmp_path / "store").find(KIND, DERIVATION.key) is not None


def test_many_processes_stage_and_tidy_up_at_once(tmp_path):
    """None of them takes a folder of the living for one of the dead."""
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


def test_a_lock_survives_the_file_of_another_name(tmp_path):
    """Keys that differ in the kind only have locks of their own."""
    store = Store(tmp_path / "store")
    with store.lock("policy", "k") as one, store.lock("memo/rule", "k") as two:
        assert one.name != two.name
        with open(one.name, "rb") as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_two_who_only_ask_for_a_lock_do_not_see_each_other(tmp_path):
    store = Store(tmp_path / "store")
    with store.lock("policy", "k") as held:
        path = store.lock_file("policy", "k")
        assert held.name == str(path) and is_held(path)
    with open(path, "rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not is_held(path)


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_file_that_goes_before_it_is_locked_is_no_lock(tmp_path, monkeypatch, made_again):
    """Another process takes it for that of a dead one; a third may have made it anew."""
    path, flock = tmp_path / "staged.lock", fcntl.flock

    def lose(file: BinaryIO, how: int) -> None:
        path.unlink()
        if made_again:
            path.touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lose)
    assert try_lock(path) is None
