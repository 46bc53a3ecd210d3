"""A process killed at any step of publishing leaves no artifact or an intact one, and does not change others.

As in SQLite's crash tests, the child counts its steps: every system call, or every line of Python. It kills itself at step n,
without cleaning up. The parent then checks the store as a reader, and publishes once more.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from training.contract.store.artifact import JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

pytestmark = pytest.mark.slow

FILES = {"config.json": b"{}", "part/one.bin": b"1" * 70_000, "part/two.bin": b"", "weights.bin": b"w" * 200_000}
DERIVATION = Derivation(kind="policy", code_version="1", inputs={}, settings={})
FINGERPRINT, OTHER = "f" * 64, "e" * 64
KILLED = 9
# Calls with an effect outside the process; a kill in any other call is a kill between two of these.
CHANGING = {
    "open",
    "write",
    "flush",
    "close",
    "mkdir",
    "rmdir",
    "chmod",
    "fsync",
    "rename",
    "replace",
    "unlink",
    "flock",
}


def publish(store: Store, fingerprint: str = FINGERPRINT, version: str = "1") -> None:
    with store.staging() as staging:
        for name, content in FILES.items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_bytes(content)
        store.publish(staging, DERIVATION.model_copy(update={"code_version": version}), JobResult(fingerprint))


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a fork of this process; return the exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Steps:
    """Counts steps, appends each to `seen`, and ends the process at step `fatal`."""

    def __init__(self, fatal: int | None = None, seen: list[str] | None = None) -> None:
        self.count, self.fatal, self.seen = 0, fatal, seen

    def system_calls(self, frame: FrameType, event: str, called: Any) -> None:
        """For sys.setprofile: count one step before a system call, and one after it."""
        if event in ("c_call", "c_return") and called.__name__ in CHANGING and not isinstance(called.__self__, str):
            self._step(f"{event} {called.__name__}")

    def lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For sys.settrace: count one step per line of this project's code."""
        if "contract" not in frame.f_code.co_filename:
            return None
        self._step(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self.lines

    def _step(self, name: str) -> None:
        self.count += 1
        if self.seen is not None:
            self.seen.append(name)
        if self.count == self.fatal:
            os._exit(KILLED)


def by_system_calls(store: Store, steps: Steps) -> None:
    sys.setprofile(steps.system_calls)
    publish(store)
    sys.setprofile(None)


def by_lines(store: Store, steps: Steps) -> None:
    sys.settrace(steps.lines)
    publish(store)
    sys.settrace(None)


def count_steps(folder: Path, run: Callable[[Store, Steps], None], prepare: Callable[[Store], None]) -> list[str]:
    publish(Store(folder / "first"))  # steps done once per process, such as imports, do not count
    store = Store(folder / "counting")
    prepare(store)
    seen: list[str] = []
    report = folder / "steps.json"

    def work() -> None:
        run(store, Steps(seen=seen))
        report.write_text(json.dumps(seen))

    assert in_child(work) == 0
    steps: list[str] = json.loads(report.read_text())
    return steps


def nothing(store: Store) -> None:
    pass


def another_artifact(store: Store) -> None:
    publish(store, OTHER, version="0")


def a_corrupt_one(store: Store) -> None:
    publish(store)
    path = store.folder("policy", FINGERPRINT) / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def check_nothing_or_all(store: Store) -> None:
    """Check that readers find intact artifacts only, and that another process can publish."""
    left_artifact = store.find("policy", DERIVATION.key)
    for name in store.fingerprints("policy"):
        artifact = store.open("policy", name)
        assert {n: (artifact.folder / n).read_bytes() for n in artifact.manifest.files} == FILES
    if left_artifact is None:
        publish(store)
    artifact = store.find("policy", DERIVATION.key)
    assert artifact is not None and artifact.file("weights.bin").read_bytes() == FILES["weights.bin"]
    with store.staging():
        names = [path.name for path in (store.root / "staging").iterdir()]
        assert len(names) == 2, f"files of the dead process remain: {names}"
    assert not [path for path in (store.root / "keys").rglob("*") if path.is_file() and path.suffix != ".json"]


def at_every_call(folder: Path, prepare: Callable[[Store], None]) -> None:
    steps = count_steps(folder, by_system_calls, prepare)
    assert len(steps) > 50
    outcomes = set()
    for fatal in range(1, len(steps) + 1):
        store = Store(folder / str(fatal))
        prepare(store)
        assert in_child(partial(by_system_calls, store, Steps(fatal))) == KILLED
        outcomes.add(store.find("policy", DERIVATION.key) is not None)
        check_nothing_or_all(store)
        assert prepare is nothing or store.open("policy", OTHER)
    assert outcomes == {False, True}, "some kills came before the key was recorded, some after"


def at_random_lines(folder: Path, prepare: Callable[[Store], None]) -> None:
    steps = len(count_steps(folder, by_lines, prepare))
    draw = random.Random(0)
    for number in range(100):
        store = Store(folder / str(number))
        prepare(store)
        fatal = draw.randint(1, steps)
        assert in_child(partial(by_lines, store, Steps(fatal))) == KILLED
        check_nothing_or_all(store)


def while_repairing(folder: Path, prepare: Callable[[Store], None]) -> None:
    for fatal in range(1, len(count_steps(folder, by_system_calls, prepare)) + 1, 3):
        store = Store(folder / str(fatal))
        prepare(store)
        assert in_child(partial(by_system_calls, store, Steps(fatal))) == KILLED
        publish(store)
        check_nothing_or_all(store)


ORDERED = ("flush", "fsync", "rename", "replace")


def in_order(folder: Path, prepare: Callable[[Store], None]) -> None:
    steps = [step.split() for step in count_steps(folder, by_system_calls, prepare)]
    order = [name for event, name in steps if event == "c_return" and name in ORDERED]
    staged = ["fsync"] * (len(FILES) + 2)  # every file, and their two folders
    small_file = ["flush", "fsync", "replace", "fsync"]  # its bytes, its name, its folder
    assert order == [*staged, *small_file, "rename", "fsync", *small_file], order


def run_in_process(trial: Callable[..., None], prepare: Callable[[Store], None] = nothing) -> None:
    """Run a trial in a small process, because its hundreds of forks are cheap, and in memory: kills need no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        command = [sys.executable, __file__, trial.__name__, folder, prepare.__name__]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.system
@pytest.mark.parametrize("prepare", [nothing, another_artifact])
def test_publish_killed_at_every_system_call_leaves_nothing_or_all(prepare):
    run_in_process(at_every_call, prepare)


@pytest.mark.system
@pytest.mark.parametrize("prepare", [nothing, another_artifact])
def test_publish_killed_at_random_lines_leaves_nothing_or_all(prepare):
    """A hundred kills each: between two system calls the store's Python state may be incomplete."""
    run_in_process(at_random_lines, prepare)


def test_publish_killed_while_replacing_a_corrupt_artifact_leaves_nothing_or_all():
    run_in_process(while_repairing, a_corrupt_one)


def test_publish_syncs_all_files_before_the_rename():
    """Only synced files survive a power cut: every file and folder before the rename, the parent after it."""
    run_in_process(in_order)


if __name__ == "__main__":
    _, called, folder, prepared = sys.argv
    globals()[called](Path(folder), globals()[prepared])
