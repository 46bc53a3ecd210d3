"""Memory and cores of a process, with control groups written by hand in the kernel's format.

The machine has 64 cores, and far more memory than the limits here.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from training.contract.system.cgroups import accelerator, cores, memory_bytes

GIB = 2**30
MakeProcess = Callable[..., Path]
# The second one is a disk of another system, with a name in Latin-1 instead of UTF-8.
UNRELATED = (
    "22 1 0:21 / /proc rw,relatime - proc proc rw",
    "40 1 8:17 / /media/Müller rw,relatime - vfat /dev/sdb1 rw",
)
WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def _sixty_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.fixture
def make_process(tmp_path: Path) -> MakeProcess:
    """Return a function to write a process's folder of /proc, with `groups`, `mounts`, and `files` below the mounts."""

    def make(groups: list[str], mounts: list[str], files: dict[str, str]) -> Path:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cgroup").write_text("".join(f"{group}\n" for group in groups))
        mounted = [mount.replace("/sys/", f"{tmp_path}/sys/") for mount in mounts]
        lines = "".join(f"{line}\n" for line in [*UNRELATED, *mounted])
        (tmp_path / "proc" / "mountinfo").write_bytes(lines.encode("latin-1"))
        for name, content in files.items():
            file = tmp_path / "sys" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")
        return tmp_path / "proc"

    return make


V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def test_limits_without_groups_are_the_whole_machine(tmp_path: Path):
    assert (memory_bytes(tmp_path), cores(tmp_path)) == (WHOLE, 64)


def test_limits_of_version_2_without_a_limit_are_the_whole_machine(make_process: MakeProcess):
    process = make_process(
        ["0::/job"], [V2], {"fs/cgroup/job/memory.max": "max", "fs/cgroup/job/cpu.max": "max 100000"}
    )
    assert (memory_bytes(process), cores(process)) == (WHOLE, 64)


def test_limits_of_version_1_without_a_limit_are_the_whole_machine(make_process: MakeProcess):
    """The kernel then shows the largest number of whole pages, and -1."""
    process = make_process(
        ["5:cpu,cpuacct:/", "4:memory:/"],
        [
            "35 31 0:32 / /sys/memory rw - cgroup cgroup rw,memory",
            "32 31 0:29 / /sys/cpu rw - cgroup cgroup rw,cpu,cpuacct",
        ],
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert (memory_bytes(process), cores(process)) == (WHOLE, 64)


def test_memory_bytes_respects_memory_high(make_process: MakeProcess):
    """systemd sets it with MemoryHigh, below the limit for killing processes."""
    files = {"job/memory.max": str(2 * GIB), "job/memory.high": str(GIB), "memory.high": "max"}
    process = make_process(["0::/job"], [V2], {f"fs/cgroup/{name}": value for name, value in files.items()})
    assert memory_bytes(process) == GIB


@pytest.mark.parametrize(("quota", "expected"), [(800000, 8), (850000, 9), (50000, 1), (9900000, 64)])
def test_cores_respects_cpu_quota(make_process: MakeProcess, quota: int, expected: int):
    """Per 100 ms: 8 cores, 8.5, 0.5, and more cores than the machine has."""
    process = make_process(["0::/job"], [V2], {"fs/cgroup/job/cpu.max": f"{quota} 100000"})
    assert cores(process) == expected


def test_limits_are_the_lowest_of_a_group_and_its_parents(make_process: MakeProcess):
    """Slurm and systemd nest groups: the limit of a job is in a parent of the process's group."""
    files = {
        "job_7/memory.max": str(GIB),
        "job_7/cpu.max": "1600000 100000",
        "job_7/step_0/memory.max": str(2 * GIB),
        "job_7/step_0/task_0/memory.max": "max",
        "job_7/step_0/task_0/cpu.max": "3200000 100000",
        "job_8/memory.max": "4096",
    }
    process = make_process(
        ["0::/slurm/job_7/step_0/task_0"], [V2], {f"fs/cgroup/slurm/{n}": v for n, v in files.items()}
    )
    assert (memory_bytes(process), cores(process)) == (GIB, 16)


def test_limits_of_both_versions_apply(make_process: MakeProcess):
    """Version 1 limits memory, version 2 limits cores."""
    process = make_process(
        ["4:memory:/pod", "1:name=systemd:/other", "0::/pod"],
        [
            "35 31 0:32 / /sys/memory rw - cgroup cgroup rw,memory",
            "37 31 0:34 / /sys/systemd rw - cgroup cgroup rw,name=systemd",
            V2,
        ],
        {
            "memory/pod/memory.limit_in_bytes": str(GIB),
            "memory/other/memory.limit_in_bytes": "4096",
            "fs/cgroup/pod/cpu.max": "200000 100000",
        },
    )
    assert (memory_bytes(process), cores(process)) == (GIB, 2)


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/docker/4f1c", "/docker/4f1c"),  # a container with the paths of its host, and its own group mounted
        ("/", "/"),  # a container with its own namespace
        ("/../../other", "/"),  # a process of another such container
        ("/elsewhere", "/docker/4f1c"),
    ],
)
def test_memory_bytes_in_a_container_uses_the_mounted_group(make_process: MakeProcess, path: str, root: str):
    mount = f"35 31 0:32 {root} /sys/memory rw - cgroup cgroup rw,memory"
    process = make_process([f"4:memory:{path}"], [mount], {"memory/memory.limit_in_bytes": str(GIB)})
    assert memory_bytes(process) == GIB


def test_cores_respects_the_affinity_of_the_process(make_process: MakeProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert cores(make_process(["0::/job"], [V2], {"fs/cgroup/job/cpu.max": "800000 100000"})) == 2


def test_accelerator_is_the_gpu_name_of_the_driver(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number in (0, 1):
        (folder := tmp_path / f"0000:0{number}:00.0").mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 68\n")
    assert accelerator("auto", tmp_path) == accelerator("cuda", tmp_path) == "NVIDIA H100 80GB HBM3"
    assert accelerator("cpu", tmp_path) == "cpu"
    assert (accelerator("auto", tmp_path / "none"), accelerator("cuda", tmp_path / "none")) == ("cpu", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert accelerator("auto", tmp_path) == "cpu"
