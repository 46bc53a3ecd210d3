"""A disk that is full or becomes read-only, and memory that runs out, at each stage, while it writes its result."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.disturbed import STAGES, CommandHost, Undisturbed, check_next_run, command_host
from tests.workflows.homes import Home

pytestmark = pytest.mark.long

# What happens at the point, the code of the message, and a text in it. `{disk}` is the folder of the file system.
DO = {
    "the disk is full": "dd if=/dev/zero of={disk}/filler bs=64k 2>/dev/null; true",
    "the disk becomes read-only": "mount --bind {disk}/home {disk}/home && "
    # A file that another process opened in between makes it busy.
    "for i in $(seq 100); do mount -o remount,bind,ro {disk}/home && exit; sleep 0.05; done; exit 1",
    "an allocation fails": "memory",
}
UNDO = {
    "the disk is full": "rm -f {disk}/filler",
    "the disk becomes read-only": "umount {disk}/home",
    "an allocation fails": "true",
}
CODES = {
    "the disk is full": "[disk-full]",
    "the disk becomes read-only": "[read-only]",
    "an allocation fails": "[out-of-memory]",
}
FAULTS = list(itertools.product(STAGES, DO))


@dataclass(frozen=True)
class Disk:
    """A file system in memory that only its host sees at `path`; `visible` is its path for this process."""

    path: Path
    host: CommandHost

    @property
    def visible(self) -> Path:
        return Path(f"/proc/{self.host.process.pid}/root{self.path}")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    folder = tmp_path_factory.mktemp("disk")
    logs = tmp_path_factory.mktemp("logs")
    with command_host(logs, "unshare", "--user", "--map-root-user", "--mount") as host:
        if host.ask({"shell": f"mount -t tmpfs -o size=256m tmpfs {folder}"}):
            if os.environ.get("CI") == "true":
                pytest.fail("CI must allow namespaces and mounts")
            pytest.skip("mounting a small file system is not permitted here")
        yield Disk(folder, host)


@pytest.mark.parametrize(("stage", "what"), FAULTS)
def test_stage_without_space_or_memory_fails_with_advice_and_goes_on(
    stage: str, what: str, undisturbed: Undisturbed, disk: Disk, tmp_path: Path, record: Callable[..., None]
) -> None:
    made = undisturbed.without(stage, tmp_path / "home")
    subprocess.run(["cp", "--archive", made.path, disk.visible / "home"], check=True)
    home, reached = Home(disk.path / "home"), tmp_path / "reached"
    try:
        of = "package" if stage == "released_model" else stage
        fault = {"of": of, "at": "write", "reached": str(reached), "do": DO[what].format(disk=disk.path)}
        command = disk.host.start(home, "run", str(undisturbed.recipe), fault=fault)
        status, text = command.wait(), " ".join(command.output.split())
        assert reached.exists(), text
        seconds = command.seconds_until_nothing_is_left()
        assert status == 1 and CODES[what] in text, text
        assert "Traceback" not in text
        disk.host.ask({"shell": UNDO[what].format(disk=disk.path)})
        check_next_run(disk.host, home, undisturbed)
        record(stage, what, f"`{CODES[what]}`", seconds, same=True)
    finally:
        disk.host.ask({"shell": UNDO[what].format(disk=disk.path)})
        shutil.rmtree(disk.visible / "home")
