"""What a job ran on, recorded in the details of its artifact, so that a number can be checked long after.

A manifest says what an artifact was made from, `recipe.json` with which settings. Here is the rest: the digest of this
package's source, the libraries, and what decides the order of sums and with it the last bits: machine, threads, number of
processes. An artifact's identity does not depend on where it was made, so none of this is in a fingerprint. Seconds and
memory are recorded by the run itself (run_state.py).
"""

import platform
from pathlib import Path
from typing import Any

import torch

from training.contract.identity.software import library_versions, source_digest
from training.distributed import Group

_CPUINFO = Path("/proc/cpuinfo")


def provenance(group: Group) -> dict[str, Any]:
    """The record for this rank; taken before the work, while the source on the disk is still what was imported."""
    return {
        "source": source_digest(),
        "libraries": library_versions() | {"torch": str(torch.__version__)},  # with its build, which decides kernels
        "platform": platform.platform(),
        "device": device_name(group.device),
        "threads": torch.get_num_threads(),
        "world": group.world,
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor as Linux reports it, else its architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
