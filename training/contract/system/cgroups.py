"""The memory and the cores that this process may use, of which a container or a scheduler may allow only a part.

Linux keeps such limits in control groups, folders of small files. /proc/self/cgroup says which groups a process is in,
/proc/self/mountinfo where they can be read. The limit of a group holds for all groups below it, so all are read, from the
process' own up to the highest visible one; in a container that is often its own.

    version 2   memory.max, memory.high, cpu.max ("200000 100000": 2 cores' time)   without a limit `max`
    version 1   memory.limit_in_bytes, cpu.cfs_quota_us of cpu.cfs_period_us              nearly 2**63, and -1

A process above memory.high is not killed, but slowed down until it uses less.

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
    """The memory of the machine, or the lowest limit of the process' groups; `process` is its folder in /proc."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups(process):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limits += _numbers(group / name)
    return min(limits)


def cores(process: Path = _SELF) -> int:
    """The cores this process may run on, or as many as its groups' CPU time amounts to, rounded up."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(process):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match [number for file in files for number in _numbers(group / file)]:
                case [quota, period] if quota > 0:
                    limits.append(quota / period)
    return math.ceil(min(limits))


def accelerator(device: str, gpus: Path = _NVIDIA) -> str:
    """Return the names of the GPUs that a job with `compute.device: {device}` runs on, or `cpu`; without importing torch.

    `gpus` is the folder in which NVIDIA's driver has one for each GPU.
    """
    if device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    names = set()
    for about in sorted(gpus.glob("*/information")):
        with contextlib.suppress(OSError):
            lines = about.read_text(encoding="utf-8", errors="replace").splitlines()
            names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(names)) or ("cuda" if device == "cuda" else "cpu")


def _numbers(file: Path) -> list[int]:
    """The numbers in a file; none if it is missing, as in the highest group of version 2, or says `max`."""
    with contextlib.suppress(OSError):
        return [int(word) for word in file.read_text().split() if word != "max"]
    return []


def _groups(process: Path) -> Iterator[Path]:
    """The folders of the groups of a process and of those above, of both versions: many machines have both mounted."""
    try:  # names in bytes of any kind, a disk's say
        mounts, groups = (os.fsdecode((process / name).read_bytes()).split("\n") for name in ("mountinfo", "cgroup"))
    except OSError:
        return
    for _, _, _, root, mounted, *_, kind, _, options in map(str.split, filter(None, mounts)):
        for _, controllers, path in (group.split(":", 2) for group in groups if group):
            if _is_mount_of(controllers, kind, options):
                yield from _upwards(Path(mounted), PurePosixPath(path), root)


def _is_mount_of(controllers: str, kind: str, options: str) -> bool:
    """Version 2 has one hierarchy, without names of controllers; in version 1 they are options of the mount."""
    if not controllers:
        return kind == "cgroup2"
    return kind == "cgroup" and {*controllers.split(",")} <= {*options.split(",")}


def _upwards(mounted: Path, path: PurePosixPath, root: str) -> list[Path]:
    """The folders of the group `path` and of those above it, in `mounted`, where the group `root` is visible.

    A path outside of `root` is not visible in this container; then the highest visible group is taken.
    """
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    return [mounted / group for group in (inside, *inside.parents)]
