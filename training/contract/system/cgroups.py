"""The memory and the cores available to this process, which a container or a scheduler may limit.

Linux keeps such limits in control groups, folders of small files. /proc/self/cgroup lists the groups of a process,
/proc/self/mountinfo their folders. A limit also holds for all groups below. So all groups count, from the process's group up
to the highest visible one, in a container often the same group.

    version 2   memory.max, memory.high, cpu.max ("200000 100000": 2 cores)         no limit: `max`
    version 1   memory.limit_in_bytes, cpu.cfs_quota_us / cpu.cfs_period_us         no limit: nearly 2**63, and -1

The kernel slows a process above memory.high down, but does not kill it.

psutil and os.cpu_count ignore these limits. https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_SELF = Path("/proc/self")
_NVIDIA = Path("/proc/driver/nvidia/gpus")


def memory_bytes(process: Path = _SELF) -> int:
    """Return the machine's memory, or the lowest limit of the process's groups. `process` is its folder in /proc."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups(process):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limits += _numbers(group / name)
    return min(limits)


def cores(process: Path = _SELF) -> int:
    """Return the number of cores for this process, by affinity or by its groups' CPU time, rounded up."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(process):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match [number for file in files for number in _numbers(group / file)]:
                case [quota, period] if quota > 0:
                    limits.append(quota / period)
    return math.ceil(min(limits))


def accelerator(device: str, gpus: Path = _NVIDIA) -> str:
    """Return the names of the GPUs of a job with this `compute.device`, or `cpu`, without importing torch.

    `gpus` is the folder of NVIDIA's driver with one folder per GPU.
    """
    if device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    names = set()
    for file in sorted(gpus.glob("*/information")):
        with contextlib.suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(names)) or ("cuda" if device == "cuda" else "cpu")


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file without `max`. The file may be missing, as in the highest group of version 2."""
    with contextlib.suppress(OSError):
        return [int(word) for word in file.read_text().split() if word != "max"]
    return []


def _groups(process: Path) -> Iterator[Path]:
    """Yield the folders of a process's groups and their parents, of both versions: many machines mount both."""
    try:  # names, such as those of disks, may hold any bytes
        mounts, groups = (os.fsdecode((process / name).read_bytes()).split("\n") for name in ("mountinfo", "cgroup"))
    except OSError:
        return
    for _, _, _, root, mounted, *_, kind, _, options in map(str.split, filter(None, mounts)):
        for _, controllers, path in (group.split(":", 2) for group in groups if group):
            if _is_mount_of(controllers, kind, options):
                yield from _upwards(Path(mounted), PurePosixPath(path), root)


def _is_mount_of(controllers: str, kind: str, options: str) -> bool:
    """Return whether a mount shows a group. Version 2 names no controllers; version 1 names them in the mount's options."""
    if not controllers:
        return kind == "cgroup2"
    return kind == "cgroup" and {*controllers.split(",")} <= {*options.split(",")}


def _upwards(mounted: Path, path: PurePosixPath, root: str) -> list[Path]:
    """Return the folders of the group `path` and its parents. The folder `mounted` shows the group `root`.

    A path outside of `root` is not visible in this container. Then the result is the highest visible group.
    """
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    return [mounted / group for group in (inside, *inside.parents)]
