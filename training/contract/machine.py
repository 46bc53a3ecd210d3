"""What of this machine a process may use: its memory and its cores, where a container or a scheduler gives it only a part.

Linux keeps such limits in control groups, folders of small files. /proc/self/cgroup says which groups a process is in,
/proc/self/mountinfo where they can be read. A limit of a group holds for all groups below it, so each is asked up to
the highest one that is to be seen; which in a container is often its own.

    version 2   memory.max, memory.high, cpu.max ("200000 100000": 2 cores' time)   without a limit `max`
    version 1   memory.limit_in_bytes, cpu.cfs_quota_us of cpu.cfs_period_us              nearly 2**63, and -1

Nobody is killed at memory.high, but whoever uses more is slowed down until it does not.

psutil and os.cpu_count know nothing of them. https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_SELF = Path("/proc/self")


def memory_bytes(process: Path = _SELF) -> int:
    """The memory of the machine, or what a group it is in may use of it; `process` is its folder in /proc."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups(process):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limits += _numbers(group / name)
    return min(limits)


def cores(process: Path = _SELF) -> int:
    """The cores this process may run on, or as many as the time of a group is worth; a part of one counts as one."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(process):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match [number for file in files for number in _numbers(group / file)]:
                case [quota, period] if quota > 0:
                    limits.append(quota / period)
    return math.ceil(min(limits))


def _numbers(file: Path) -> list[int]:
    """None in a file that is not there, as in the highest group of version 2; and `max` is none."""
    with contextlib.suppress(OSError):
        return [int(word) for word in file.read_text().split() if word != "max"]
    return []


def _groups(process: Path) -> Iterator[Path]:
    """The folders of the groups of a process and of those above, of both versions: many machines have both mounted."""
    try:
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        paths = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, _, _, root, mounted, *_, kind, _, options in mounts:
        for _, controllers, path in paths:
            if _is_mount_of(controllers, kind, options):
                yield from _upwards(Path(mounted), PurePosixPath(path), root)


def _is_mount_of(controllers: str, kind: str, options: str) -> bool:
    """Version 2 has one hierarchy, and names no controllers; those of version 1 are among the options of its mount."""
    if not controllers:
        return kind == "cgroup2"
    return kind == "cgroup" and {*controllers.split(",")} <= {*options.split(",")}


def _upwards(mounted: Path, path: PurePosixPath, root: str) -> Iterator[Path]:
    """The group `path` and those above, below `mounted`, where `root` is to be seen.

    A path that is not below it leads out of what this container sees; then the highest group it sees is asked.
    """
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    group = mounted / inside
    yield group
    while group != mounted:
        group = group.parent
        yield group
